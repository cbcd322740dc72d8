"""One rank or engine as a Ray actor: its process, its placement, and remote calls as futures."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers.utils import logging

from posttrain.errors import InputError
from posttrain.orchestration.deadlines import collective_timeout
from posttrain.orchestration.failures import WorkerDiedError
from posttrain.orchestration.rank import Rank, process_status
from posttrain.orchestration.rank_log import RankLog
from posttrain.orchestration.ray_cluster import Places
from posttrain.orchestration.workers import RankLayout
from posttrain.types import OpenGroup

P = ParamSpec("P")
T = TypeVar("T")

_CLOSING_S = _STATUS_S = 5.0
_LOOK_PERIOD_S = 0.5
_NEEDED = ("raylet", "gcs_server")
CONTROL = "control"  # calls that run concurrently with the rank's current operation


class RankActor:
    """The process of a rank. It joins the process group first, then builds the rank, which shards over that group."""

    def __init__(self, place: int, layout: RankLayout) -> None:
        self.place, self.layout = place, layout
        torch.set_num_threads(layout.num_threads or max(1, (os.cpu_count() or 1) // layout.ranks_per_node))
        logging.set_verbosity_error()  # progress bars and warnings would clutter the driver's console
        logging.disable_progress_bar()
        self.log = RankLog(layout.log_folder, layout.name_of(place))
        self.rank: Any = None
        self._operation, self._began_s = "", time.monotonic()  # the current one, or none, and since when
        self._busy_s, self._looked_s = 0.0, time.monotonic()

    def node(self) -> tuple[str, str]:
        """IP and id of the rank's node."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def build(self, build: Callable[[], object], address: tuple[str, int]) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor only its own GPU
        rank, size = self.layout.place_in_group(self.place)
        with self.log.operation("build"):
            if size > 1:
                cuda = torch.cuda.is_available() and self.layout.device != "cpu"
                torch.distributed.init_process_group(
                    "cuda:nccl,cpu:gloo" if cuda else "gloo",
                    init_method=f"tcp://{address[0]}:{address[1]}",
                    rank=rank,
                    world_size=size,
                    timeout=collective_timeout(),
                )
            self.rank = build()

    @ray.method(concurrency_group=CONTROL)
    def request_stop(self) -> None:
        """Runs concurrently with sampling."""
        if self.rank is not None:
            self.rank.request_stop()

    @ray.method(concurrency_group=CONTROL)
    def take_whole_groups(self) -> list[OpenGroup]:
        return self.rank.take_whole_groups() if isinstance(self.rank, Rank) else []

    @ray.method(concurrency_group=CONTROL)
    def close(self) -> None:
        """Ends processes that the rank has started, also during an operation."""
        if isinstance(self.rank, Rank):
            self.rank.close()

    def run(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self._operation, self._began_s = operation, time.monotonic()
        try:
            with self.log.operation(operation):
                return getattr(self.rank, operation)(*args, **kwargs)
        finally:
            self._busy_s += time.monotonic() - max(self._began_s, self._looked_s)
            self._operation = ""

    @ray.method(concurrency_group=CONTROL)
    def status(self) -> dict[str, object]:
        """Also while an operation runs: the process, what it is doing, and its busy share of the time since the last
        call."""
        now, operation = time.monotonic(), self._operation
        busy_s = self._busy_s + (now - max(self._began_s, self._looked_s) if operation else 0.0)
        share = min(1.0, busy_s / max(now - self._looked_s, 1e-3))
        self._busy_s, self._looked_s = 0.0, now
        device = torch.device("cuda" if torch.cuda.is_available() and self.layout.device != "cpu" else "cpu")
        known = self.rank.status() if isinstance(self.rank, Rank) else process_status(device)
        return {**known, "node": ray.util.get_node_ip_address(), "operation": operation, "busy_share": share}


class RayWorker:
    """One rank behind an actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor

    def submit(self, operation: Callable[Concatenate[object, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return future_of(self.actor.run.remote(operation.__name__, args, kwargs))

    def take_whole_groups(self) -> Future[list[OpenGroup]]:
        return future_of(self.actor.take_whole_groups.remote())


def statuses(group: str, workers: Sequence[RayWorker]) -> list[dict[str, object]]:
    """Of each worker, in order; of one that does not answer soon, no more than its number."""
    calls: list[Future[dict[str, object]]] = [future_of(worker.actor.status.remote()) for worker in workers]
    wait(calls, timeout=_STATUS_S)
    answered = [call.result(timeout=0) if call.done() and call.exception(timeout=0) is None else {} for call in calls]
    return [{"group": group, "rank": rank, **status} for rank, status in enumerate(answered)]


def start_actor(place: int, layout: RankLayout, places: Places) -> ActorHandle:
    """Start on the `place`-th place of the run."""
    return (
        ray.remote(concurrency_groups={CONTROL: 1})(RankActor)
        .options(
            num_cpus=layout.num_places_of(place),
            num_gpus=layout.gpus_per_rank * layout.num_places_of(place) if places.use_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                places.group, placement_group_bundle_index=layout.node_of(place)
            ),
        )
        .remote(place, layout)
    )


def end_actors(workers: Sequence[RayWorker]) -> None:
    """Ray ends an actor's child processes with it, so a vLLM could not remove its files."""
    if PrivateRayWatch.current is not None and PrivateRayWatch.current.loss is not None:
        return  # without a GCS, calls wait for a minute; the workers end with their raylet
    wait([future_of(worker.actor.close.remote()) for worker in workers], timeout=_CLOSING_S)
    for worker in workers:
        ray.kill(worker.actor)


class PrivateRayWatch:
    """Fails all calls once the private Ray of this process has lost its raylet or its GCS.

    Ray would notice a lost GCS after a minute, and a lost raylet not at all: until its parent, this process, has waited
    for it, it counts as alive for its workers.
    """

    current: ClassVar[PrivateRayWatch | None] = None

    def __init__(self) -> None:
        self.loss: WorkerDiedError | None = None
        self._calls: WeakSet[Future[Any]] = WeakSet()
        self._lock = threading.Lock()
        self._over = threading.Event()
        PrivateRayWatch.current = self
        threading.Thread(target=self._watch, name="private-ray", daemon=True).start()

    def _watch(self) -> None:
        node = ray._private.worker._global_node
        while not self._over.wait(_LOOK_PERIOD_S):
            dead = [(name, process) for name, process in node.dead_processes() if name in _NEEDED]
            for name, process in dead[:1]:
                loss = f"the {name} process of its private Ray ended with exit code {process.returncode}"
                with self._lock:
                    self.loss = WorkerDiedError(loss)
                    calls = list(self._calls)
                for call in calls:
                    settle(call, self.loss)
                return

    def add(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.add(call)
        if self.loss is not None:
            settle(call, self.loss)

    def close(self) -> None:
        self._over.set()
        PrivateRayWatch.current = None


def future_of(reference: ray.ObjectRef[T]) -> Future[T]:
    """The result of a remote call. Raises the rank's original error."""
    outcome: Future[T] = Future()
    if PrivateRayWatch.current is not None:
        PrivateRayWatch.current.add(outcome)

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        cause = getattr(error, "cause", None)
        if error is None:
            with suppress(InvalidStateError):
                outcome.set_result(done.result(timeout=0))
        elif isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
            settle(outcome, WorkerDiedError(str(error)))
        elif isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, Exception):
            if not isinstance(cause, InputError):
                cause.__cause__ = error  # its text is the rank's traceback
            settle(outcome, cause)
        else:
            settle(outcome, error)

    reference.future().add_done_callback(pass_on)
    return outcome


def settle(outcome: Future[Any], error: BaseException) -> None:
    """Set the error unless the future already has a result or an error."""
    with suppress(InvalidStateError):
        outcome.set_exception(error)
