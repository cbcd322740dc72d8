"""A private Ray that has lost a process fails the calls that are under way, and those that follow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

ray_actor = pytest.importorskip("posttrain.orchestration.ray_actor", reason="Ray is not installed (posttrain[ray])")

from posttrain.orchestration.failures import WorkerDiedError  # noqa: E402


class FakeNode:
    def __init__(self) -> None:
        self.dead: list[tuple[str, Any]] = []

    def dead_processes(self) -> list[tuple[str, Any]]:
        return self.dead


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    node = FakeNode()
    monkeypatch.setattr(ray_actor, "_LOOK_PERIOD_S", 0.01)
    monkeypatch.setattr(ray_actor.ray._private.worker, "_global_node", node)
    yield node
    if ray_actor.PrivateRayWatch.current is not None:
        ray_actor.PrivateRayWatch.current.close()


@pytest.mark.parametrize("lost", ["raylet", "gcs_server"])
def test_calls_fail_when_a_process_is_lost(lost: str, node: FakeNode) -> None:
    watch = ray_actor.PrivateRayWatch()
    call: Future[int] = Future()
    watch.add(call)
    node.dead = [("log_monitor", SimpleNamespace(returncode=1)), (lost, SimpleNamespace(returncode=-9))]
    with pytest.raises(WorkerDiedError, match=f"the {lost} process of its private Ray ended with exit code -9"):
        call.result(timeout=60)
    later: Future[int] = Future()
    watch.add(later)
    assert isinstance(later.exception(timeout=60), WorkerDiedError)
    ray_actor.end_actors([SimpleNamespace(actor=None)])  # does not call them: nobody would answer


def test_other_processes_may_end_and_results_stay(node: FakeNode) -> None:
    watch = ray_actor.PrivateRayWatch()
    done: Future[int] = Future()
    watch.add(done)
    done.set_result(3)
    node.dead = [("log_monitor", SimpleNamespace(returncode=1))]
    watch.close()
    assert watch.loss is None
    assert done.result(timeout=0) == 3
    assert ray_actor.PrivateRayWatch.current is None
