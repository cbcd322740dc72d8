"""Pipelined rounds: dedicated engines sample the next step's round while the current step trains.

`take` returns the groups of the finished round and starts the next one with the engines' current weights. `publish`
waits for that round, then sends new weights, so weights change only between rounds. No round runs during a checkpoint,
and the open groups in the checkpoint include everything sampled ahead. A resumed run equals the uninterrupted one bit
for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace

from posttrain.algorithms.step_reports import StageClock
from posttrain.errors import RankLostError
from posttrain.roles import Progress, ShowProgress, WeightSync, no_progress
from posttrain.rollouts.rounds import RoundRollouts
from posttrain.types import NoiseKey, Sampling, TakenGroups, Task

Compare = Callable[[Sequence[Task], Sampling, NoiseKey], None]


@dataclass
class PipelinedRollouts:
    """A `RolloutSource`, and the `WeightSync` of its engines."""

    rounds: RoundRollouts
    weights: WeightSync
    limit_s: float  # for one round
    thread: ThreadPoolExecutor
    compare: Compare | None = None  # the engine with the trainer, between rounds
    _is_first: bool = True  # step of this process
    _running: Future[float] | None = None
    _timings_s: dict[str, float] = field(default_factory=dict)  # of the last finished round

    @classmethod
    def start(
        cls,
        rounds: RoundRollouts,
        weights: WeightSync,
        limit_s: float,
        cleanup: ExitStack,
        compare: Compare | None = None,
    ) -> PipelinedRollouts:
        thread = ThreadPoolExecutor(1, thread_name_prefix="round")
        cleanup.callback(thread.shutdown, wait=False, cancel_futures=True)  # the engines are closed after it
        quiet = replace(rounds.fresh, show_progress=_only_of_main_thread(rounds.fresh.show_progress))
        return cls(replace(rounds, fresh=quiet), weights, limit_s, thread, compare)

    def take(self, num_groups: int, step: int) -> TakenGroups:
        clock = StageClock()
        if self._is_first:
            self.weights.publish(step - 1)  # before a round runs beside the step, in which ranks change their weights
            self._is_first = False
        if not self.rounds.is_sampled(num_groups, step):  # the first step of a run
            self.rounds.sample(num_groups, step, version=step - 1, clock=clock)
        taken = self.rounds.hand_out(num_groups, step, clock)
        if self.compare is not None:
            fresh = self.rounds.fresh
            self.compare([group.task for group in taken.groups], fresh.sampling, NoiseKey(fresh.seed, step))
        timings_s, self._timings_s = {**taken.timings_s, **self._timings_s}, {}
        if step < self.rounds.max_steps:
            self._running = self.thread.submit(self._sample, num_groups, step + 1, step - 1)
        return replace(taken, timings_s=timings_s)

    def _sample(self, num_groups: int, step: int, version: int) -> float:
        """Returns the duration in seconds."""
        start = time.perf_counter()
        self.rounds.sample(num_groups, step, version, StageClock())
        return time.perf_counter() - start

    def publish(self, version: int) -> None:
        if self._running is not None:
            start = time.perf_counter()
            ended, _ = wait([self._running], timeout=self.limit_s)
            if not ended:
                raise RankLostError(
                    f"the round for step {version + 1} has not ended within {self.limit_s:.0f} s: an engine or an "
                    "environment hangs. The run folder's logs/engine_N.log end with what the engines were doing. If "
                    "they are only slow, set POSTTRAIN_WORKER_DEADLINE_S to more seconds. The same command continues "
                    "from what was saved"
                )
            round_s, self._running = self._running.result(timeout=0), None
            self._timings_s = {"generation_ahead": round_s, "generation_ahead_wait": time.perf_counter() - start}
        self.weights.publish(version)


def _only_of_main_thread(show: ShowProgress) -> ShowProgress:
    """Shows progress in the main thread only: the training bar is active at the same time."""

    def shown(label: str, total: int) -> AbstractContextManager[Progress]:
        if threading.current_thread() is threading.main_thread():
            return show(label, total)
        return no_progress(label, total)

    return shown
