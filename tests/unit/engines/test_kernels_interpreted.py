"""Runs `interpreted_kernels.py`: the kernels' tests in a process where Triton interprets on the CPU."""

from __future__ import annotations

from pathlib import Path

from triton_without_gpu import run_interpreted


def test_kernels_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_kernels.py"), more_than=50)
