"""Command lines that mix options and `key=value` words in any order, as Hydra users type them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from posttrain.redaction import redact_argument

EXIT_BAD_INPUT = 64
RAW = argparse.RawDescriptionHelpFormatter  # keeps line breaks
Subparsers: TypeAlias = "argparse._SubParsersAction[OverridesParser]"


class OverridesParser(argparse.ArgumentParser):
    """Takes overrides before, between and after options; argparse alone stops at the first option that follows one.

    `actions`: first words with their own parser, created on demand with the program's name. argparse's subparsers cannot be
    optional next to positional arguments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.actions: dict[str, Callable[[str], argparse.ArgumentParser]] = {}

    def error(self, message: str) -> NoReturn:
        """Like argparse's, with the exit code that every bad input has."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        if given and (make := self.actions.get(given[0])) is not None:
            return make(f"{self.prog} {given[0]}").parse_known_args(given[1:], namespace)
        parsed, rest = super().parse_known_args(given, namespace)
        words = [word for word in rest if not word.startswith("-")]
        parsed.words = [*(getattr(parsed, "words", None) or []), *words]
        options = [word for word in rest if word.startswith("-")]
        if options and self._subparsers is None:
            # argparse would report it with the usage of the top-level program, which names no option.
            self._refuse(options)
        return parsed, options

    def _refuse(self, options: Sequence[str]) -> NoReturn:
        from posttrain.data.errors import nearest

        hint = nearest(options[0].partition("=")[0], self._option_string_actions)
        self.error(f"unrecognized arguments: {redact_argument(' '.join(options))}{hint}")


def add_command(commands: Subparsers, name: str, summary: str, **options: Any) -> OverridesParser:
    """A subcommand. Its description, printed as it is, is the summary as a sentence unless `options` have another one."""
    usual = {"description": f"{summary[0].upper()}{summary[1:]}.", "formatter_class": RAW}
    return commands.add_parser(name, help=summary, **{**usual, **options})
