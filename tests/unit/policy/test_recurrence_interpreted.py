"""Runs `interpreted_recurrence.py`: the kernels of recurrent layers where Triton interprets on the CPU."""

from __future__ import annotations

from pathlib import Path

from triton_without_gpu import run_interpreted


def test_recurrent_layers_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_recurrence.py"), more_than=17)
