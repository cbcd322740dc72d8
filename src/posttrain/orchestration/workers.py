"""Calls to ranks that return futures, and the wait for them: with a deadline, and with the rank's number in every error.

An operation is named by the method itself, `worker.submit(Rank.update, …)`, so a type checker sees its arguments and its
result, wherever the rank runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from posttrain.errors import InputError
from posttrain.orchestration.rank import Rank
from posttrain.policy.parallel import Mesh

P = ParamSpec("P")
T = TypeVar("T")

DEADLINE_VARIABLE = "POSTTRAIN_WORKER_DEADLINE_S"
_SHORT_S, _FILES_S, _COMPUTE_S = 900.0, 3600.0, 4 * 3600.0
# Far above what an operation takes on a machine that suits it: a deadline ends a hang, not a slow step.
_DEADLINES_S = {
    "build": _FILES_S,
    "save": _FILES_S,
    "begin_save": _FILES_S,
    "prepare_save": _FILES_S,
    "load": _FILES_S,
    "reference_fingerprint": _FILES_S,
    "update": _COMPUTE_S,
    "evaluate": _COMPUTE_S,
    "logprobs": _COMPUTE_S,
    "reference_logprobs": _COMPUTE_S,
    "generate": _COMPUTE_S,
    "sample_round": _COMPUTE_S,
}
_GRACE_S = 10.0  # after the first error, for the rank that caused it: others often fail in a collective with it


class WorkerDiedError(RuntimeError):
    """The process of a rank has ended."""


class WorkerTimeoutError(RuntimeError):
    """A rank has not answered before the deadline of an operation."""


class Worker(Protocol):
    """One rank, in this process or in another."""

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...


class WorkerGroup(Protocol):
    """The ranks of a run. They take part in the same operations in the same order."""

    mesh: Mesh
    in_process: bool  # callbacks reach it

    @property
    def workers(self) -> Sequence[Worker]: ...

    def close(self) -> None: ...


class LocalWorker:
    """One rank in this process; a `WorkerGroup` of itself. Its futures are done when `submit` returns."""

    mesh = Mesh()
    in_process = True

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @property
    def workers(self) -> Sequence[Worker]:
        return [self]

    def submit(self, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(getattr(self.rank, operation.__name__)(*args, **kwargs))  # errors are raised here and now
        return done

    def close(self) -> None:
        pass


def call_all(
    group: WorkerGroup, operation: Callable[Concatenate[Rank, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """The same call on every rank; results by rank."""
    return gather(operation.__name__, [worker.submit(operation, *args, **kwargs) for worker in group.workers])


def gather(operation: str, pending: Sequence[Future[T]]) -> list[T]:
    """Results by rank. An error names the rank that failed, died or did not answer, the operation and the time waited."""
    limit_s = deadline_s(operation)
    start = time.monotonic()
    _, missing = wait(pending, timeout=limit_s, return_when=FIRST_EXCEPTION)
    errors = _errors(pending)
    if errors and missing and not any(isinstance(error, InputError) for error in errors.values()):
        wait(pending, timeout=_GRACE_S)
        errors = _errors(pending)
    waited = f"{time.monotonic() - start:.0f} s after the call"
    for rank, error in errors.items():
        if isinstance(error, WorkerDiedError):
            raise WorkerDiedError(f"rank {rank} died during {operation}, {waited}: {error}") from error
    for rank, error in errors.items():
        if not isinstance(error, InputError):
            error.add_note(f"rank {rank}, during {operation}, {waited}")
        raise error
    if missing:
        late = ", ".join(str(rank) for rank, future in enumerate(pending) if future in missing)
        raise WorkerTimeoutError(
            f"rank {late} of {len(pending)} has not finished {operation} within {limit_s:.0f} s. A rank may hang in a collective "
            f"that another one has left. If it is only slow, set {DEADLINE_VARIABLE} to more seconds"
        )
    return [future.result() for future in pending]


def deadline_s(operation: str) -> float:
    chosen = os.environ.get(DEADLINE_VARIABLE)
    if not chosen:
        return _DEADLINES_S.get(operation, _SHORT_S)
    try:
        seconds = float(chosen)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InputError(f"{DEADLINE_VARIABLE} is {chosen!r}; accepted: a number of seconds above 0")
    return seconds


def _errors(pending: Sequence[Future[T]]) -> dict[int, BaseException]:
    found = {rank: future.exception() for rank, future in enumerate(pending) if future.done()}
    return {rank: error for rank, error in found.items() if error is not None}
