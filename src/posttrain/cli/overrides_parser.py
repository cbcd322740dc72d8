"""Command lines that mix options and `key=value` words in any order, as Hydra users type them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

EXIT_BAD_INPUT = 64


class OverridesParser(argparse.ArgumentParser):
    """Takes overrides before, between and after options; argparse alone stops at the first option that follows one."""

    def error(self, message: str) -> NoReturn:
        """Like argparse's, with the exit code that every bad input has."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_args(args, namespace)
        words = [word for word in rest if not word.startswith("-")]
        parsed.words = [*(getattr(parsed, "words", None) or []), *words]
        return parsed, [word for word in rest if word.startswith("-")]
