"""What comparisons with the formulas of others share, and faults of actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from posttrain.policy.objectives import clipped, distillation


@pytest.fixture
def no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our denominators have an epsilon of 1e-8, as in NeMo RL. TRL's have none, and in float64 the difference shows."""
    for module in (clipped, distillation):
        monkeypatch.setattr(module, "EPS", 0.0)


@pytest.fixture
def fault_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a fault happen to the worker that an operation is called on for the n-th time; without one, kills it.

    A worker that will be killed is kept busy before, so that it cannot finish the operation.
    """
    import ray

    from posttrain.orchestration.ray_actor import RayWorker

    def prepare(operation: str, count: int, fault: Callable[[Any], None] = ray.kill) -> None:
        calls: list[str] = []

        def submit(self: RayWorker, called: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
            calls.append(called.__name__)
            is_here = called.__name__ == operation and calls.count(operation) == count
            if is_here and fault is ray.kill:
                self.actor.__ray_call__.remote(lambda actor: time.sleep(60))
            pending = own_submit(self, called, *args, **kwargs)
            if is_here:
                fault(self.actor)
            return pending

        own_submit = RayWorker.submit
        monkeypatch.setattr(RayWorker, "submit", submit)

    return prepare
