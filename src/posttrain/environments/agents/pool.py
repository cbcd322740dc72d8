"""The driver's side of agents: their worker processes, their time limits and their results.

The time that an agent waits for the model does not count, so that a busy engine ends no rollout. Its own time is
limited in all (`timeout_s`) and between two requests (`turn_timeout_s`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.rewards import AgentConfig
from posttrain.environments.agents.runner import AgentItem, code_files
from posttrain.environments.pool import Batch, ScoringPool, to_score
from posttrain.environments.settings import RewardSettings
from posttrain.environments.worker_process import WorkerProcess
from posttrain.files.json_files import JsonObject
from posttrain.types import Score


@dataclass(frozen=True)
class AgentOutcome(Score):
    """An agent that has returned. Either a reward, or an answer for the judge."""

    answer: str | None = None


@dataclass
class AgentClock:
    """When an agent worked, and when it waited for the model."""

    waited_s: float = 0.0  # in requests that have been answered
    num_waiting: int = 0
    # When the first request of those that wait came, or the last one was answered. -inf: it has not begun.
    changed_at: float = -math.inf
    problem: str = ""  # why the endpoint gives the agent up
    began_at: float = 0.0
    own_s: float = 0.0  # that an agent which has ended did not wait for the model

    def ask(self) -> None:
        if self.num_waiting == 0:
            self.changed_at = time.monotonic()
        self.num_waiting += 1

    def answered(self) -> None:
        """`num_waiting` comes last: as long as it is not 0, the thread that watches the limits reads nothing else."""
        if self.num_waiting == 1:
            now = time.monotonic()
            self.waited_s, self.changed_at = self.waited_s + now - self.changed_at, now
        self.num_waiting -= 1

    @property
    def worked_s(self) -> float:
        """Since it was handed out or answered; 0 while it waits, or has not begun."""
        is_working = self.num_waiting == 0 and self.changed_at > -math.inf
        return time.monotonic() - self.changed_at if is_working else 0.0


class AgentPool(ScoringPool):
    """`run` is called in a thread of its own, while another one answers the agents' requests."""

    def __init__(self, settings: RewardSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.config, AgentConfig)
        own = settings.config
        named = [str(own.kwargs.get("taskset", ""))] if own.agent == "verifiers" else own.agent
        self.code_files: list[Path] = code_files(named, settings.base_folder)
        self._turn_limit_s = settings.config.turn_timeout_s or math.inf
        self._clocks: Sequence[AgentClock] = ()
        self._on_end: Callable[[int, Score], None] = lambda place, score: None

    def run(
        self, items: Sequence[AgentItem], clocks: Sequence[AgentClock], on_end: Callable[[int, Score], None]
    ) -> list[Score]:
        """An `AgentOutcome` for each, or a `Score` with the error. `on_end` gets its place as soon as there is one."""
        self._clocks, self._on_end = clocks, on_end
        return self.score(items)

    def _hand_out(self, batch: Batch) -> None:
        before = set(batch.running)
        super()._hand_out(batch)
        for worker in set(batch.running) - before:
            clock = self._clocks[batch.running[worker][0] - 1]
            clock.began_at = clock.changed_at = time.monotonic()

    def _left_s(self, number: int, limit: float) -> float:
        clock, now = self._clocks[number - 1], time.monotonic()
        if clock.problem:
            return -1.0
        if clock.num_waiting:
            return math.inf
        return min(limit + clock.waited_s, clock.changed_at + self._turn_limit_s) - now

    def _limit_text(self, number: int, limit: float) -> str:
        if problem := self._clocks[number - 1].problem:
            return problem
        if limit + self._clocks[number - 1].waited_s > time.monotonic():
            return f"the agent asked nothing for {self._turn_limit_s:g} s (turn_timeout_s)"
        return f"timeout after {self.settings.timeout_s:g} s, without the time that it waited for the model"

    def _conclude(self, batch: Batch, worker: WorkerProcess, score: Score) -> None:
        number, _ = batch.running[worker]
        super()._conclude(batch, worker, score)
        clock = self._clocks[number - 1]
        until = clock.changed_at if clock.num_waiting else time.monotonic()
        clock.own_s = max(until - clock.began_at - clock.waited_s, 0.0)
        self._on_end(number - 1, score)

    def _read(self, reply: JsonObject) -> Score:
        if "error" in reply:
            return to_score(reply)
        return AgentOutcome(reply.get("reward"), dict(reply.get("parts", {})), answer=reply.get("answer"))
