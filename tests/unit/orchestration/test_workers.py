"""Waiting for ranks: deadlines, dead ranks, and errors that name the rank, the operation and the time."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import InputError
from posttrain.orchestration import deadlines, workers
from posttrain.orchestration.failures import WorkerDiedError, WorkerTimeoutError
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.workers import DEADLINE_VARIABLE, LocalWorker, call_all, gather
from posttrain.policy.parallel.mesh import Mesh


def answered(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def failed(error: Exception) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_exception(error)
    return done


def hung() -> Future[Any]:
    """The future of a rank that never answers."""
    return Future()


def test_results_come_by_rank() -> None:
    assert gather("update", [answered(0), answered(1), answered(2)]) == [0, 1, 2]


def test_a_hung_rank_is_named_with_the_operation_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE_VARIABLE, "0.1")
    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"rank 1 of 3 .* generate within 0 s.*" + DEADLINE_VARIABLE):
        gather("generate", [answered(0), hung(), answered(2)])
    with pytest.raises(WorkerTimeoutError, match=r"rank 0, 2 of 3"):
        gather("update", [hung(), answered(1), hung()])
    assert time.monotonic() - start < 5


def test_a_dead_rank_ends_the_wait_for_the_others_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_GRACE_S", 0.05)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 2 died during training \(update\), 0 s .*killed"):
        gather("update", [hung(), answered(1), failed(WorkerDiedError("killed"))])
    assert time.monotonic() - start < 5


def test_the_dead_rank_is_named_and_not_the_one_whose_collective_failed_with_it() -> None:
    pending = [failed(RuntimeError("connection closed by peer")), failed(WorkerDiedError("killed"))]
    with pytest.raises(WorkerDiedError, match=r"rank 1 died"):
        gather("update", pending)


def test_an_error_of_a_rank_is_raised_with_its_number() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        gather("logprobs", [answered(0), failed(ZeroDivisionError("nothing left"))])
    assert caught.value.__notes__ == ["rank 1, during logprobs, 0 s after the call"]


def test_an_error_in_the_input_is_raised_at_once_and_as_it_is() -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"^policy\.model_name: no such folder$"):
        gather("build", [hung(), failed(InputError("policy.model_name: no such folder"))])
    assert time.monotonic() - start < 5


def test_every_operation_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEADLINE_VARIABLE, raising=False)
    operations = [name for name in vars(Rank) if not name.startswith("_")]
    assert len(operations) > 10
    for operation in operations:
        assert 60 <= deadlines.deadline_s(operation) <= 24 * 3600
    assert set(deadlines.OPERATIONS) <= {*operations, "build", "reserve", "score"}


def test_a_deadline_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE_VARIABLE, "soon")
    with pytest.raises(InputError, match=rf"{DEADLINE_VARIABLE} is 'soon'; accepted: a number of seconds"):
        gather("update", [answered(0)])


def test_a_local_worker_is_a_group_of_one_and_calls_its_rank() -> None:
    class Calls:
        def save(self, folder: Path, optimizer: bool) -> tuple[Path, bool]:
            return folder, optimizer

    rank: Any = Calls()
    group = LocalWorker(rank)
    assert group.mesh == Mesh()
    assert call_all(group, Rank.save, Path("a"), optimizer=True) == [(Path("a"), True)]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=4), Mesh(dp=2, cp=2), Mesh(dp=3, cp=2, tp=2)])
def test_ranks_of_a_shard_are_neighbours(mesh: Mesh) -> None:
    shards = [mesh.dp_index(rank) for rank in range(mesh.size)]
    assert shards == sorted(shards)
    assert mesh.one_per_shard(shards) == list(range(mesh.dp))
