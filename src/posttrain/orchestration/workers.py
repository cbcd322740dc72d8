"""Asynchronous calls to ranks, and waiting for their futures with a deadline and the rank's number in every error.

An operation is named by the method itself, `worker.submit(Rank.update, …)`, so a type checker sees its arguments and
its result, wherever the rank runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from posttrain.errors import InputError
from posttrain.orchestration.deadlines import DEADLINE_VARIABLE, deadline_s
from posttrain.orchestration.failures import Where, WorkerTimeoutError, explain, first_cause
from posttrain.orchestration.rank import Rank
from posttrain.policy.parallel.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")

_HANGS = {
    "rank": "A rank may hang in a collective that another one has left",
    "engine": "Its device or its machine may hang",
}
_GRACE_S = 10.0  # wait after the first error for the rank that caused it: others often fail in a collective


class Worker(Protocol):
    """One rank, in this process or in another."""

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...


class WorkerGroup(Protocol):
    """The ranks of a run. They take part in the same operations in the same order."""

    mesh: Mesh
    in_process: bool  # callbacks work
    unit: str  # name of its members in messages: rank, engine

    @property
    def num_nodes(self) -> int: ...

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def engines(self) -> WorkerGroup:
        """The workers that sample: this group, or dedicated engines."""
        ...

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

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _outcome(partial(getattr(self.rank, operation.__name__), *args, **kwargs))

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
    """Results by rank. An error names the rank that failed, died or did not answer, the operation and the
    time waited.
    """
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
        late = ", ".join(str(rank) for rank, future in enumerate(pending) if future in missing)
        raise WorkerTimeoutError(
            f"{unit} {late} of {len(pending)} has not finished {operation} within {limit_s:.0f} s. {_HANGS[unit]}; its "
            f"log, in the run folder's logs, ends with what it was doing. If it is only slow, set {DEADLINE_VARIABLE} "
            "to more seconds"
        )
    return [future.result(timeout=0) for future in pending]


def _errors(pending: Sequence[Future[T]]) -> dict[int, BaseException]:
    found = {rank: future.exception() for rank, future in enumerate(pending) if future.done()}
    return {rank: error for rank, error in found.items() if error is not None}
