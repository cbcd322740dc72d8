"""The help of `posttrain serve` and its page name the defaults that are in force."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from posttrain.apps.serve.canary import CanaryRules
from posttrain.apps.serve.options import EngineOptions, ServerLimits
from posttrain.cli import serve_command
from posttrain.engines.native.kv_cache import _CPU_DEFAULT_BYTES, GIB

PAGE = Path(__file__).parents[4] / "docs" / "serve.md"


def help_of_options() -> dict[str, str]:
    """The line of each option."""
    commands = argparse.ArgumentParser().add_subparsers()
    serve_command.add_parser(commands)
    actions = commands.choices["serve"]._actions
    return {action.option_strings[-1]: action.help or "" for action in actions if action.option_strings}


def test_help_prints_the_actual_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(max_batch_size=101, max_prefill_tokens=102, gpu_memory_utilization=0.103)
    limits = ServerLimits(
        max_queue=104, max_body_bytes=105 * 2**20, max_samples=106, request_timeout_s=107.5, body_timeout_s=108.0
    )
    rules = CanaryRules(share=0.109, max_error_rate=0.11, min_requests=111, min_feedback=112)
    for name, value in (("EngineOptions", options), ("ServerLimits", limits), ("CanaryRules", rules)):
        monkeypatch.setattr(serve_command, name, lambda value=value: value)
    monkeypatch.setattr(serve_command, "LONGEST_UNASKED_TOKENS", 113)
    monkeypatch.setattr(serve_command, "_DRAIN_TIMEOUT_S", 114.0)
    found = help_of_options()
    printed = {
        "--max-batch-size": "(101)",
        "--max-prefill-tokens": "(102)",
        "--gpu-memory-utilization": "(0.103)",
        "--max-queue": "(104)",
        "--max-body-bytes": "(105 MiB)",
        "--max-samples": "(106)",
        "--request-timeout-s": "(107.5)",
        "--body-timeout-s": "(108)",
        "--canary-share": "(0.109)",
        "--canary-max-error-rate": "(0.11)",
        "--canary-min-requests": "(111)",
        "--canary-min-feedback": "(112)",
        "--max-model-len": "≤ 113)",
        "--drain-timeout-s": "(114)",
    }
    assert {option: found[option][-len(default) :] for option, default in printed.items()} == printed


def test_help_states_the_cpu_cache_size() -> None:
    """Written by hand there: the number lives beside the tensors."""
    assert f"(default: {_CPU_DEFAULT_BYTES / GIB:g} on a CPU)" in help_of_options()["--kv-cache-gib"]


def test_docs_state_the_same_defaults_as_the_help() -> None:
    help_texts = help_of_options()
    named = re.findall(r"`(--[a-z-]+)` \(([\d.]+(?: MiB)?)\)", PAGE.read_text(encoding="utf-8"))
    assert len({option for option, _ in named}) >= 10
    for option, default in named:
        assert help_texts[option].endswith(f"({default})"), option
