"""The driver's side of multi-turn environments: their worker processes and results.

The workers are those of `environments/pool.py`: a call that fails, hangs or kills its worker comes back as a `Score`
with the reason. The state of a conversation travels with it, so any worker can serve any turn.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.environments.pool import Batch, ScoringPool, scored_by_name, to_score
from posttrain.environments.settings import RewardSettings
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.worker_process import WorkerProcess
from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.types import Message, Score

_MAX_HOMES = 10_000


@dataclass(frozen=True)
class TurnOutcome(Score):
    """A call that was answered. `reward` None: it gave none."""

    state: bytes = b""
    observation: tuple[Message, ...] = ()  # an empty role is left to the chat template
    done: bool = False
    answer: str | None = None  # for the judge
    counts: Mapping[str, float] = field(default_factory=dict)
    tools: tuple[JsonMapping, ...] = ()


class _TurnPool(ScoringPool):
    def __init__(self, settings: RewardSettings) -> None:
        super().__init__(settings)
        self._homes: dict[str, WorkerProcess] = {}  # by conversation; oldest first

    def _next(self, batch: Batch, worker: WorkerProcess) -> int | None:
        """A conversation stays with the worker that began it where workers hold more of it than its state."""
        if not self.settings.config.keeps_conversations:
            return super()._next(batch, worker)
        for number in batch.waiting:
            item = batch.items[number - 1]
            assert isinstance(item, TurnItem)
            home = self._homes.get(item.conversation)
            if home is None or home is worker or home not in self._workers:
                if item.conversation:
                    self._homes[item.conversation] = worker
                if len(self._homes) > _MAX_HOMES:
                    del self._homes[next(iter(self._homes))]
                batch.waiting.remove(number)
                return number
        return None

    def _read(self, reply: JsonObject) -> Score:
        if "error" in reply:
            return to_score(reply)
        return TurnOutcome(
            reward=reply.get("reward"),
            parts=dict(reply.get("parts", {})),
            state=base64.b64decode(reply.get("state", "")),
            observation=tuple(reply.get("observation", ())),
            done=bool(reply.get("done", False)),
            answer=reply.get("answer"),
            counts=dict(reply.get("counts", {})),
            tools=tuple(reply.get("tools", ())),
        )


class TurnRouter:
    """The environments of a run that take turns, by name. No process starts before there is something to ask."""

    def __init__(self, settings: Mapping[str, RewardSettings]) -> None:
        self._pools = {name: _TurnPool(one) for name, one in settings.items()}
        self._tools: dict[str, tuple[JsonMapping, ...]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._pools)

    def ask(self, calls: Sequence[tuple[str, TurnItem]]) -> list[Score]:
        """The result of each call (environment, item): a `TurnOutcome`, or a `Score` with the error."""
        names = [name for name, _ in calls]
        return scored_by_name(names, lambda name, rows: self._pools[name].score([calls[row][1] for row in rows]))

    def tools(self, name: str) -> tuple[JsonMapping, ...]:
        """The schemas of the tools that the environment's class declares."""
        if name not in self._tools:
            (outcome,) = self.ask([(name, TurnItem("describe"))])
            if not isinstance(outcome, TurnOutcome):
                raise InputError(f"env.{name}.turns cannot be used: {outcome.error}")
            self._tools[name] = outcome.tools
        return self._tools[name]

    def interrupt(self) -> None:
        """Callable from any thread: a running `ask` ends with StopRequested within half a second."""
        for pool in self._pools.values():
            pool.interrupt()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
