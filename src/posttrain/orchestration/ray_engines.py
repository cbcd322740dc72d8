"""Engines on places of their own, each an actor that is replaced when it dies.

Engines know nothing of each other. A replacement gets the newest weights and repeats the call that was lost: the same tasks
and the same noise keys, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from posttrain.engines.weight_handover import SentWeights
from posttrain.orchestration.failures import WorkerDiedError, WorkerTimeoutError
from posttrain.orchestration.launch import RankLayout
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.ray_actor import RayWorker, future_of, settle, start_actor
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.workers import WorkerGroup, deadline_s, gather
from posttrain.policy.parallel import Mesh

P = ParamSpec("P")
T = TypeVar("T")

MAX_REPLACEMENTS = 2  # in one call: what ends every new process too, another one does not fix
_GRACE_S = 10.0  # the wait for all engines ends before that for one, with a message that names those that are late


class RayEngine:
    """One engine. Its calls run one after another, in the order of `submit`."""

    def __init__(
        self, index: int, build: Callable[[], object], layout: RankLayout, places: Places, say: Callable[[str], None]
    ) -> None:
        self.index, self._build, self._layout, self._places, self._say = index, build, layout, places, say
        self._newest: Sequence[SentWeights] | None = None
        self._is_closing = False
        self._waits_for: Future[Any] | None = None
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{index}")
        self.built = self._start()

    def _start(self) -> Future[None]:
        place = self._layout.num_ranks + self.index
        actor = start_actor(place, replace(self._layout, is_process_group=False), self._places)
        self.worker = RayWorker(actor)
        return future_of(actor.build.remote(self._build, ("", 0)))

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._calls.submit(self._call, operation, args, kwargs)

    def _call(self, operation: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        if operation.__name__ == Rank.receive_weights.__name__:
            self._newest = args[0]
        for num_replaced in range(MAX_REPLACEMENTS + 1):
            try:
                return self._wait(self.worker.submit(operation, *args, **kwargs), operation.__name__)
            except WorkerDiedError:
                if self._is_closing or num_replaced == MAX_REPLACEMENTS:
                    raise
                self._replace(operation.__name__)
        raise AssertionError("the last attempt returns or raises")

    def _replace(self, operation: str) -> None:
        self._say(f"engine {self.index} died during {operation}: another one is started, and repeats it")
        ray.kill(self.worker.actor)  # it may only be out of reach, and would keep its place
        self._wait(self._start(), "build")
        if self._newest is not None:
            self._wait(self.worker.submit(Rank.receive_weights, self._newest), Rank.receive_weights.__name__)

    def _wait(self, pending: Future[T], operation: str) -> T:
        limit_s = deadline_s(operation) + _GRACE_S
        self._waits_for = pending
        try:
            return pending.result(timeout=limit_s)
        except TimeoutError as error:
            if pending.done():
                raise  # by the engine itself
            raise WorkerTimeoutError(
                f"engine {self.index} has not finished {operation} within {limit_s:.0f} s"
            ) from error

    def close(self) -> None:
        self._is_closing = True
        ray.kill(self.worker.actor)
        self._calls.shutdown(wait=False, cancel_futures=True)
        if self._waits_for is not None:  # its thread would keep this process until the deadline
            settle(self._waits_for, WorkerDiedError("the run has ended"))


class RayEngines:
    """`WorkerGroup` of engines. Starting them goes on after the constructor, beside the ranks."""

    in_process = False
    unit = "engine"

    def __init__(
        self, build: Callable[[], object], layout: RankLayout, places: Places, say: Callable[[str], None]
    ) -> None:
        self.mesh, self.num_nodes = Mesh(dp=layout.num_engines), layout.num_nodes
        self._engines = [RayEngine(index, build, layout, places, say) for index in range(layout.num_engines)]

    @property
    def workers(self) -> Sequence[RayEngine]:
        return self._engines

    @property
    def engines(self) -> WorkerGroup:
        return self

    def wait_until_built(self) -> list[tuple[str, str]]:
        """Returns their nodes: IP and id."""
        gather("build", [engine.built for engine in self._engines], self.unit)
        return gather("build", [future_of(engine.worker.actor.node.remote()) for engine in self._engines], self.unit)

    def request_stop(self) -> None:
        for engine in self._engines:
            engine.worker.actor.request_stop.remote()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
