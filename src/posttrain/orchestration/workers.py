"""Starts the ranks of a run, one in this process or several as Ray actors; calls them asynchronously, and waits for
their futures with a deadline and the rank's number in every error.

An operation is named by the method itself, `worker.submit(Rank.update, …)`, so a type checker sees its arguments and
its result, wherever the rank runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from posttrain.config.placement import PlacedGroup, Placement
from posttrain.errors import InputError
from posttrain.orchestration.deadlines import DEADLINE_VARIABLE, deadline_s
from posttrain.orchestration.failures import Where, WorkerTimeoutError, explain, first_cause
from posttrain.orchestration.rank import Rank
from posttrain.policy.parallel.mesh import Mesh
from posttrain.types import OpenGroup

P = ParamSpec("P")
T = TypeVar("T")

_HANGS, _IS_LOST = "A rank may hang in a collective that another one has left", "Its device or its machine may hang"
_GRACE_S = 10.0  # wait after the first error for the rank that caused it: others often fail in a collective


class Worker(Protocol):
    """One rank, in this process or in another."""

    def submit(self, operation: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def take_whole_groups(self) -> Future[list[OpenGroup]]:
        """Groups that the running sampling call has finished since the last call of this."""


class WorkerGroup(Protocol):
    """The ranks of a run. They take part in the same operations in the same order."""

    mesh: Mesh
    in_process: bool  # callbacks work
    unit: str  # name of its members in messages: rank, engine, reference

    @property
    def num_nodes(self) -> int: ...

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def engines(self) -> WorkerGroup:
        """The workers that sample: this group, or dedicated engines."""

    def beside(self, name: str) -> WorkerGroup | None:
        """The worker group of that name on devices of its own."""

    def status(self) -> list[dict[str, object]]:
        """Of all processes, those of groups beside these ranks too, for `workers.jsonl`."""

    def request_stop(self) -> None:
        """Callable from any thread: current and later sampling ends with StopRequested."""

    def close(self) -> None: ...


class LocalWorker:
    """One rank in this process; a `WorkerGroup` of itself. Its futures are done when `submit` returns."""

    mesh = Mesh()
    in_process = True
    unit = "rank"
    num_nodes = 1

    def __init__(self, rank: Any) -> None:
        self.rank = rank  # any object with the operations that are called

    @classmethod
    def start(cls, build: Callable[[], object]) -> LocalWorker:
        built: Future[Any] = _outcome(build)
        return cls(gather("build", [built])[0])

    @property
    def workers(self) -> Sequence[Worker]:
        return [self]

    @property
    def engines(self) -> WorkerGroup:
        return self

    def beside(self, name: str) -> WorkerGroup | None:
        return None

    def status(self) -> list[dict[str, object]]:
        return [{"group": "policy", "rank": 0, **self.rank.status()}]

    def submit(self, operation: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _outcome(partial(getattr(self.rank, operation.__name__), *args, **kwargs))

    def take_whole_groups(self) -> Future[list[OpenGroup]]:
        return _outcome(list)  # no call is running while this one does

    def request_stop(self) -> None:
        self.rank.request_stop()

    def close(self) -> None:
        if isinstance(self.rank, Rank):
            self.rank.close()


def _outcome(call: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done


def call_all(
    group: WorkerGroup, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """The same call on every rank; results by rank."""
    pending = [worker.submit(operation, *args, **kwargs) for worker in group.workers]
    return gather(operation.__name__, pending, group.unit)


def gather(operation: str, pending: Sequence[Future[T]], unit: str = "rank") -> list[T]:
    """Results by rank. An error names the rank that failed, died or did not answer, operation and time waited."""
    limit_s = deadline_s(operation)
    start = time.monotonic()
    _, missing = wait(pending, timeout=limit_s, return_when=FIRST_EXCEPTION)
    errors = _errors(pending)
    if errors and missing and not any(isinstance(error, InputError) for error in errors.values()):
        wait(pending, timeout=_GRACE_S)
        errors = _errors(pending)
    waited_s = time.monotonic() - start
    if (first := first_cause(errors)) is not None:
        error = errors[first]
        if isinstance(error, InputError):
            raise error
        known = explain(error, Where(first, len(pending), operation, waited_s, unit))
        if known is not None:
            raise known from error
        error.add_note(f"{unit} {first}, during {operation}, {waited_s:.0f} s after the call")
        raise error
    if missing:
        why = _HANGS if unit == "rank" else _IS_LOST
        late = ", ".join(str(rank) for rank, future in enumerate(pending) if future in missing)
        raise WorkerTimeoutError(
            f"{unit} {late} of {len(pending)} has not finished {operation} within {limit_s:.0f} s. {why}; its log, in "
            f"the run folder's logs, ends with what it was doing. If it is only slow, set {DEADLINE_VARIABLE} "
            "to more seconds"
        )
    return [future.result(timeout=0) for future in pending]


def _errors(pending: Sequence[Future[T]]) -> dict[int, BaseException]:
    found = {rank: future.exception() for rank, future in enumerate(pending) if future.done()}
    return {rank: error for rank, error in found.items() if error is not None}


@dataclass(frozen=True)
class RankLayout:
    """Number of ranks and nodes, and resources per rank. Places are numbered: those of ranks, then of each group."""

    num_nodes: int = 1
    ranks_per_node: int = 1  # groups included
    gpus_per_rank: int = 1  # if there are GPUs
    device: str = "auto"  # of the config: auto, cpu or cuda
    num_threads: int | None = None  # CPUs per rank; None: its share of the node's cores
    is_process_group: bool = True  # False: independent ranks without a process group
    mesh: Mesh | None = None  # how the ranks are arranged; None: data parallel
    placement: Placement | None = None  # None: only ranks, in the order of the nodes
    log_folder: Path | None = None  # the run folder, for the logs of ranks; None: they write none

    @property
    def arrangement(self) -> Mesh:
        return self.mesh or Mesh(dp=self.num_ranks)

    @property
    def num_places(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        return self.num_places if self.placement is None else len(self.placement.ranks)

    @property
    def groups(self) -> tuple[PlacedGroup, ...]:
        return () if self.placement is None else self.placement.groups

    @property
    def gpus_per_node(self) -> int:
        return self.ranks_per_node * self.gpus_per_rank

    def node_of(self, place: int) -> int:
        if self.placement is None:
            return place // self.ranks_per_node
        return [*self.placement.ranks, *(machine for group in self.groups for machine in group.machines)][place]

    def places_of(self, group: PlacedGroup, member: int) -> range:
        """The first place of each of its actors."""
        before = self.groups[: self.groups.index(group)]
        first = self.num_ranks + sum(len(other.machines) for other in before) + member * group.size
        return range(first, first + group.size, group.per_actor)

    def _group_of(self, place: int) -> tuple[PlacedGroup, int] | None:
        """The group of a place, and its number there; None: a rank's."""
        place -= self.num_ranks
        for group in self.groups if place >= 0 else ():
            if place < len(group.machines):
                return group, place
            place -= len(group.machines)
        return None

    def num_places_of(self, place: int) -> int:
        """Of the actor that begins at this place."""
        found = self._group_of(place)
        return 1 if found is None else found[0].per_actor

    def place_in_group(self, place: int) -> tuple[int, int]:
        """Rank and size in its process group, which spans all ranks or one member of a group."""
        if (found := self._group_of(place)) is None:
            return (place, self.num_ranks) if self.is_process_group else (0, 1)
        group, number = found
        return number % group.size // group.per_actor, group.size // group.per_actor

    def name_of(self, place: int) -> str:
        if (found := self._group_of(place)) is None:
            return f"rank_{place}"
        group, number = found
        part, num_parts = self.place_in_group(place)
        name = f"{group.name}_{number // group.size}"
        return name if num_parts == 1 else f"{name}_part_{part}"


def start_workers(
    build: Callable[[], object],
    layout: RankLayout,
    launcher: str,
    *,
    beside: Mapping[str, Callable[[], object]] | None = None,
    quiet: bool = False,
) -> WorkerGroup:
    """`build` makes a rank, `beside` a member of each group of the layout, in the process that calls it. Picklable."""
    size = layout.num_places
    if launcher == "local" and size > 1:
        raise InputError(
            f"cluster.launcher: local is one process, but num_nodes x gpus_per_node is {size}; use ray or auto"
        )
    if size == 1 and launcher != "ray":
        return LocalWorker.start(build)
    try:
        from posttrain.orchestration.ray_workers import RayWorkers
    except ImportError as error:
        raise InputError(
            f"cluster: {size} processes need Ray, which is not installed: pip install 'posttrain[ray]'; "
            "or set cluster.num_nodes=1 cluster.gpus_per_node=1"
        ) from error
    workers = RayWorkers(build, layout, _warn, beside or {})
    if not quiet:
        _warn(workers.summary)
    return workers


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
