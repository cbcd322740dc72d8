"""Command lines that mix options and `key=value` words in any order, as Hydra users type them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class OverridesParser(argparse.ArgumentParser):
    """Takes overrides before, between and after options; argparse alone stops at the first option that follows one."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_args(args, namespace)
        words = [word for word in rest if not word.startswith("-")]
        parsed.words = [*(getattr(parsed, "words", None) or []), *words]
        return parsed, [word for word in rest if word.startswith("-")]
