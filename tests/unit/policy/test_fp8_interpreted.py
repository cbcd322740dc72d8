"""Runs `interpreted_fp8.py`: FP8 on a CPU, in a process where Triton interprets instead of compiling."""

from __future__ import annotations

from pathlib import Path

from triton_without_gpu import run_interpreted


def test_fp8_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_fp8.py"), more_than=56)
