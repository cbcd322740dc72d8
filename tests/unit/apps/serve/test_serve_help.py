"""The help of `posttrain serve` and its page name the defaults that are in force."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.cli import serve_command
from posttrain.cli.overrides_parser import OverridesParser
from posttrain.engines.native.kv_cache import _CPU_DEFAULT_BYTES, GIB

PAGE = Path(__file__).parents[4] / "docs" / "serve.md"


def help_of_options() -> dict[str, str]:
    """The line of each option."""
    parser = OverridesParser()
    serve_command.add_arguments(parser)
    return {action.option_strings[-1]: action.help or "" for action in parser._actions if action.option_strings}


def test_help_states_the_cpu_cache_size() -> None:
    """Written by hand there: the number lives beside the tensors."""
    assert f"(default: {_CPU_DEFAULT_BYTES / GIB:g} on a CPU)" in help_of_options()["--kv-cache-gib"]


def test_docs_state_the_same_defaults_as_the_help() -> None:
    help_texts = help_of_options()
    named = re.findall(r"`(--[a-z-]+)` \(([\d.]+(?: MiB)?)\)", PAGE.read_text(encoding="utf-8"))
    assert len({option for option, _ in named}) >= 10
    for option, default in named:
        assert help_texts[option].endswith(f"({default})"), option
