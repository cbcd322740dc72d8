"""Runs of other systems, with the metrics under our names, so that the doctor can look at them. Read only."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.watch.foreign import nemo_rl, prime_rl, trl, verl
from posttrain.apps.watch.foreign.run import ForeignRun

__all__ = ["EXPECTED", "ForeignRun", "open_foreign_run"]

EXPECTED = (
    "a run folder of posttrain (metrics.jsonl, run.json), or the output of TRL (trainer_state.json), NeMo RL (TensorBoard's "
    "event files), verl (the file of its file logger) or prime-rl (metrics.jsonl of its file monitor)"
)


def open_foreign_run(folder: Path) -> ForeignRun | None:
    """None if none of the known systems wrote it."""
    if (state := trl.find(folder)) is not None:
        return trl.read(folder, state)
    if (file := verl.find(folder)) is not None:
        return verl.read(folder, file)
    if events := nemo_rl.find(folder):
        return nemo_rl.read(folder, events)
    if files := prime_rl.find(folder):
        return prime_rl.read(folder, files)
    return None
