"""Scores completions in N worker processes, one completion at a time in each, with a strict time limit.

Failures are isolated: a worker that dies or exceeds its time limit is killed with all its child processes and replaced,
and its completion is unscored with the reason. The result does not depend on the number of workers or on which of them
was faster. The pool is independent of what a reward is.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from posttrain.environments.settings import RewardSettings
from posttrain.environments.worker_process import START_LIMIT_S, WorkerProcess, wait_for
from posttrain.errors import StopRequested
from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import redact
from posttrain.roles import Progress
from posttrain.types import Score

_MAX_FAILED_STARTS = 3
_MAX_SHOWN_LINES = 100
_LONGEST_WAIT_S = 0.5  # also the delay to detect a dead worker whose children keep its pipes open


class ScoringInterrupted(StopRequested):
    """The scores are no longer needed."""


class ScoringPool:
    """The worker processes of one reward. They start on first use and keep running."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.num_workers = _num_workers(settings)
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0  # in a row
        self._start_failure = Score(None, error="no worker has been started")
        self._shown_lines = 0
        self._closed = False
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        # Also runs when the interpreter ends.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers, os.getpid())

    def score(self, items: Sequence[object], progress: Progress | None = None) -> list[Score]:
        """One score per item, in the order of the items."""
        assert not self._closed, "this environment has been closed"
        with self._lock:
            batch = Batch(items, progress)
            for worker in list(self._workers):
                worker.exchange()
                if worker.gone:
                    self._discard(worker)
            # The cause of failed starts may be gone: try once more.
            self._failed_starts = min(self._failed_starts, _MAX_FAILED_STARTS - 1)
            try:
                while batch.unfinished:
                    if self._interrupted.is_set():
                        raise ScoringInterrupted
                    self._start_workers(batch)
                    self._hand_out(batch)
                    self._collect(batch)
            finally:
                for worker in list(batch.running):  # only when interrupted: their replies would mix with the next batch
                    self._discard(worker)
            return batch.results()

    def interrupt(self) -> None:
        """Cancel a `score` in another thread, and every later one, within half a second."""
        self._interrupted.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._finalizer()

    def _start_workers(self, batch: Batch) -> None:
        wanted = min(self.num_workers, len(batch.waiting) + len(batch.running))
        while len(self._workers) < wanted and self._failed_starts < _MAX_FAILED_STARTS:
            try:
                self._workers.append(WorkerProcess(self.settings))
            except OSError as error:
                self._note_failed_start(f"{type(error).__name__}: {error}", None)
        if not self._workers:
            while batch.waiting:
                batch.finish(batch.waiting.popleft(), self._start_failure)

    def _hand_out(self, batch: Batch) -> None:
        for worker in list(self._workers):
            if not batch.waiting:
                return
            if not worker.ready or worker in batch.running or (number := self._next(batch, worker)) is None:
                continue
            batch.running[worker] = (number, time.monotonic() + self.settings.timeout_s)
            worker.send(number, batch.payloads[number])

    def _next(self, batch: Batch, worker: WorkerProcess) -> int | None:
        """The item that this idle worker gets, taken from those that wait."""
        return batch.waiting.popleft()

    def _collect(self, batch: Batch) -> None:
        """Wait until something happens; then replies, deaths, limits, in this order: a reply in time always counts."""
        if not self._workers:
            return
        left = [self._left_s(number, limit) + 0.001 for number, limit in batch.running.values()]
        wait_for(self._workers, min([_LONGEST_WAIT_S, *left]))
        now = time.monotonic()
        for worker in list(self._workers):
            for number, reply in worker.exchange():
                self._accept(batch, worker, number, reply)
            if worker.failed_start is not None:
                self._note_failed_start(str(worker.failed_start["error"]), worker.failed_start["traceback"])
                self._discard(worker)
            elif worker.gone:
                self._bury(batch, worker)
            elif worker in batch.running and self._left_s(*batch.running[worker]) < 0:
                problem = self._limit_text(*batch.running[worker])
                self._conclude(batch, worker, Score(None, error=problem, traceback=worker.stack()))
                self._discard(worker)
            elif not worker.ready and worker.started_at + START_LIMIT_S < now:
                self._note_failed_start(f"it was not ready after {START_LIMIT_S:g} s", worker.stack())
                self._discard(worker)

    def _left_s(self, number: int, limit: float) -> float:
        """Seconds until the item is given up, by the time `limit` that it got when it was handed out."""
        return limit - time.monotonic()

    def _limit_text(self, number: int, limit: float) -> str:
        return f"timeout after {self.settings.timeout_s:g} s"

    def _accept(self, batch: Batch, worker: WorkerProcess, number: int, reply: JsonObject) -> None:
        expected, _ = batch.running.get(worker, (None, 0.0))
        if number != expected:
            worker.gone = True  # a reply without a request: something else writes to our pipe
            return
        self._conclude(batch, worker, self._read(reply))
        self._show(worker.take_output())
        if reply.get("out_of_memory"):
            worker.gone = True  # it exits after this reply: the next answer would be lost

    def _read(self, reply: JsonObject) -> Score:
        return to_score(reply)

    def _conclude(self, batch: Batch, worker: WorkerProcess, score: Score) -> None:
        number, _ = batch.running.pop(worker)
        batch.finish(number, score)
        worker.has_worked = True
        self._failed_starts = 0

    def _bury(self, batch: Batch, worker: WorkerProcess) -> None:
        reason, last_words = worker.death()
        if worker in batch.running:
            self._conclude(batch, worker, Score(None, error=reason, traceback=last_words))
        elif not worker.has_worked:
            self._note_failed_start(reason, last_words)
        self._discard(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _note_failed_start(self, reason: str, traceback: str | None) -> None:
        self._failed_starts += 1
        line = " ".join(reason.split())[:500]
        self._start_failure = Score(
            None, error=f"no worker of {self.settings.path} could start: {line}", traceback=traceback or reason
        )

    def _show(self, text: str) -> None:
        """Forward output of reward functions, up to a limit."""
        for line in redact(text).splitlines():  # before it is cut: a key may have several lines
            if self._shown_lines > _MAX_SHOWN_LINES:
                return
            self._shown_lines += 1
            if self._shown_lines > _MAX_SHOWN_LINES:
                line = "(further output is not shown)"
            print(f"[{self.settings.path}] {line[:500]}", file=sys.stderr)


class Batch:
    """The items of one call: waiting, running (by worker), and finished. Numbers count from 1."""

    def __init__(self, items: Sequence[object], progress: Progress | None) -> None:
        self.items = items
        self.payloads: dict[int, bytes] = {}
        self.waiting: deque[int] = deque()
        self.running: dict[WorkerProcess, tuple[int, float]] = {}  # worker -> item, time at which it is killed
        self._scores: list[Score | None] = [None] * len(items)
        self._progress = progress
        self.unfinished = len(items)
        for number, item in enumerate(items, start=1):
            try:
                self.payloads[number] = pickle.dumps(item)
                self.waiting.append(number)
            except Exception as error:
                reason = f"the task cannot be sent to a worker: {type(error).__name__}: {error}"
                self.finish(number, Score(None, error=" ".join(reason.split())[:500]))

    def finish(self, number: int, score: Score) -> None:
        assert self._scores[number - 1] is None, "an item is finished once"
        self._scores[number - 1] = score
        self.payloads.pop(number, None)
        self.unfinished -= 1
        if self._progress is not None:
            self._progress(1)

    def results(self) -> list[Score]:
        assert self.unfinished == 0
        return [score for score in self._scores if score is not None]


def scored_by_name(names: Sequence[str], score: Callable[[str, Sequence[int]], Sequence[Score]]) -> list[Score]:
    """One score per row, in their order, from one call of `score` for all rows of a name."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)
    found: dict[int, Score] = {}
    for name, rows in rows_of.items():
        found.update(zip(rows, score(name, rows), strict=True))
    return [found[row] for row in range(len(names))]


def to_score(reply: JsonObject) -> Score:
    if "error" in reply:
        return Score(None, error=str(reply["error"]), traceback=reply.get("traceback"))
    return Score(float(reply["reward"]), parts=dict(reply["parts"]))


def _num_workers(settings: RewardSettings) -> int:
    """Math verification is CPU-bound, so more workers than cores do not help; functions may be I/O-bound."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if settings.config.mostly_waits:
        return settings.num_workers or settings.config.default_num_workers
    if settings.num_workers is not None and not settings.config.keeps_cores_busy:
        return settings.num_workers
    return min(settings.num_workers or settings.config.default_num_workers, cores)


def _stop_all(workers: list[WorkerProcess], owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: only the parent may stop the workers
    for worker in workers:
        worker.close_requests()
    for worker in workers:
        worker.stop()
    workers.clear()
