"""Command lines that mix options and `key=value` words in any order, as Hydra users type them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeAlias

from posttrain.errors import ExitCode
from posttrain.files.redaction import redact_argument

RAW = argparse.RawDescriptionHelpFormatter  # keeps line breaks
Subparsers: TypeAlias = "argparse._SubParsersAction[OverridesParser]"


class OverridesParser(argparse.ArgumentParser):
    """Takes overrides before, between and after options; argparse alone stops at the first option that follows one.

    `actions`: first words with their own parser, created on demand with the program's name. argparse's subparsers cannot be
    optional next to positional arguments. `short_names`: settings that may also be given as options, `--lr 1e-6`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.actions: dict[str, Callable[[str], argparse.ArgumentParser]] = {}
        self.short_names: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        """Like argparse's, with the exit code that every bad input has, and with the command that was probably meant."""
        if (match := re.search(r"invalid choice: '([^']*)'", message)) and self._subparsers is not None:
            self.exit(ExitCode.BAD_INPUT, f"{self.prog}: error: unknown command {match[1]!r}{self._meant(match[1])}\n")
        self.print_usage(sys.stderr)
        self.exit(ExitCode.BAD_INPUT, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = self._without_dashes(list(sys.argv[1:] if args is None else args))
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

    def _without_dashes(self, given: list[str]) -> list[str]:
        """`--lr 1e-6` and `--lr=1e-6` as `lr=1e-6`, for the short names of settings."""
        words, rest = [], iter(given)
        for word in rest:
            name, equals, value = word.partition("=")
            short = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or short not in self.short_names or name in self._option_string_actions:
                words.append(word)
            elif equals:
                words.append(f"{short}={value}")
            elif (following := next(rest, None)) is None:
                self.error(f"{word} needs a value, e.g. {short}=…")
            else:
                words.append(f"{short}={following}")
        return words

    def _meant(self, word: str) -> str:
        """A hint to put behind an unknown command."""
        from posttrain.data.errors import nearest

        known = [name for action in self._actions for name in (action.choices or ()) if isinstance(name, str)]
        if word.lower() in ("train", "run", "finetune", "fine-tune") and "grpo" in known:
            return "; grpo, dpo, rm and sft train: e.g. posttrain grpo --config FILE"
        return nearest(word, known) or f"; one of {', '.join(known)}"

    def _refuse(self, options: Sequence[str]) -> NoReturn:
        from posttrain.data.errors import nearest

        known = [*self._option_string_actions, *(f"--{name.replace('_', '-')}" for name in self.short_names)]
        hint = nearest(options[0].partition("=")[0], known)
        self.error(f"unrecognized arguments: {redact_argument(' '.join(options))}{hint}")


def add_command(commands: Subparsers, name: str, summary: str, **options: Any) -> OverridesParser:
    """A subcommand. Its description, printed as it is, is the summary as a sentence unless `options` have another one."""
    usual = {"description": f"{summary[0].upper()}{summary[1:]}.", "formatter_class": RAW}
    return commands.add_parser(name, help=summary, **{**usual, **options})
