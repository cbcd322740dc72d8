"""The policy's ranks, and the case of one rank in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from posttrain.policy.worker import PolicyWorker


class WorkerGroup(Protocol):
    """N ranks that run the methods of `PolicyWorker` in lockstep."""

    size: int
    in_process: bool  # callbacks reach it

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank, each with its own arguments; results by rank. An error on a rank is raised here."""
        ...

    def close(self) -> None: ...


class LocalWorker:
    """One rank in this process."""

    size = 1
    in_process = True

    def __init__(self, worker: PolicyWorker) -> None:
        self.worker = worker

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self.worker, method)(*arguments[0])]

    def close(self) -> None:
        pass
