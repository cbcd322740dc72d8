"""`workers.jsonl`: phases of steps that are long enough to follow, and the ranks from time to time."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.reporting.worker_rows import RANKS_PERIOD_S, WorkerRows


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def rows_of(folder: Path) -> list[dict[str, object]]:
    path = folder / "workers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def phases(folder: Path) -> list[tuple[object, object]]:
    return [(row["step"], row["phase"]) for row in rows_of(folder)]


def test_phase_is_written_when_it_begins(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path, list, lambda: True, Clock())
    workers.step = 1
    for phase in ("sampling", "training", "training", "sampling"):
        workers.phase(phase)
    assert phases(tmp_path) == [(1, "sampling"), (1, "training"), (1, "sampling")]


def test_phases_of_short_steps_are_not_written(tmp_path: Path) -> None:
    clock = Clock()
    workers = WorkerRows(tmp_path, list, lambda: True, clock)
    for step, seconds in ((1, 5.0), (2, 0.5), (3, 5.0), (4, 5.0)):
        workers.step = step
        workers.phase("training")
        clock.now += seconds
        workers.step_done(step)
    written = [step for step, phase in phases(tmp_path) if phase == "training"]
    assert written == [1, 2, 4], "step 3 came after a short one"


def test_ranks_are_asked_once_in_a_period(tmp_path: Path) -> None:
    clock = Clock()
    asked: list[float] = []
    workers = WorkerRows(tmp_path, lambda: asked.append(clock.now) or [{"rank": 0}], lambda: True, clock)
    for step in range(1, 10):
        workers.step_done(step)
        clock.now += RANKS_PERIOD_S / 2
    assert len(asked) == 5
    assert [row["ranks"] for row in rows_of(tmp_path)] == [[{"rank": 0}]] * 5


def test_rank_that_does_not_answer_does_not_end_the_run(tmp_path: Path) -> None:
    def fail() -> list[dict[str, object]]:
        raise RuntimeError("rank 1 is gone")

    WorkerRows(tmp_path, fail, lambda: True, Clock()).step_done(1)
    assert rows_of(tmp_path) == []


def test_nothing_is_written_after_a_newer_attempt_has_begun(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path, list, lambda: False, Clock())
    workers.phase("training")
    workers.step_done(1)
    assert rows_of(tmp_path) == []


def test_deleted_folder_is_no_error(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path / "gone", list, lambda: True, Clock())
    workers.phase("training")
    workers.step_done(1)
