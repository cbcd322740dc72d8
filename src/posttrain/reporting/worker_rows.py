"""`workers.jsonl`: what the processes of a run are doing, for readers outside the run.

    {"step": 7, "time": 1763290000.1, "phase": "Training policy"}            a phase begins
    {"step": 7, "time": 1763290004.9, "phase": "step done", "ranks": [...]}  host, process, device, memory of each rank

The file is not a record: a run continues if it cannot be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from posttrain.reporting.run_files import WORKERS_FILE, Row, append_rows

RANKS_PERIOD_S = 10.0
SHORT_STEP_S = 2.0  # the phases of shorter steps are not written
STEP_DONE = "step done"
AskRanks = Callable[[], Sequence[Row]]


class WorkerRows:
    def __init__(
        self,
        folder: Path,
        ask_ranks: AskRanks,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder / WORKERS_FILE
        self._ask_ranks = ask_ranks
        self._may_write = may_write
        self._clock = clock
        self._next_ranks = 0.0
        self._last_done: float | None = None
        self._steps_are_short = False
        self._phase = ""
        self.step = 0  # the one that has begun

    def phase(self, phase: str) -> None:
        """A phase begins or continues: a repeated phase, such as updates, is written once."""
        if phase != self._phase and not self._steps_are_short:
            self._append({"step": self.step, "time": self._clock(), "phase": phase})
        self._phase = phase

    def step_done(self, step: int) -> None:
        """Between steps the ranks are free to answer; they are asked at most once in a period."""
        now, self._phase = self._clock(), ""
        self._steps_are_short = self._last_done is not None and now - self._last_done < SHORT_STEP_S
        self._last_done = now
        if now >= self._next_ranks:
            self._next_ranks = now + RANKS_PERIOD_S
            with suppress(Exception):  # the next operation of a faulty rank raises its error
                self._append({"step": step, "time": now, "phase": STEP_DONE, "ranks": list(self._ask_ranks())})

    def _append(self, row: Row) -> None:
        with suppress(OSError):
            if self._may_write():
                append_rows(self._path, [row])
