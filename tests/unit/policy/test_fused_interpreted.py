"""Runs `interpreted_fused.py` and `interpreted_experts.py` in processes where Triton interprets on the CPU."""

from __future__ import annotations

from pathlib import Path

from triton_without_gpu import run_interpreted


def test_fused_layers_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_fused.py"), more_than=171)


def test_experts_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_experts.py"), more_than=36)
