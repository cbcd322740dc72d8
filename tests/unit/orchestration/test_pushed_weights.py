"""Weights for engines of their own: published before the first sample, by the fastest way, removed with the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_sharded_roles import Ranks

from posttrain.engines import weights
from posttrain.engines.weights import Handover, PartOffset, SentWeights
from posttrain.orchestration.sharded import PushedWeights


@pytest.fixture(autouse=True)
def _own_memory_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of /dev/shm, where tests in other processes write files of the same name."""
    monkeypatch.setattr(weights, "MEMORY_FOLDER", tmp_path_factory.mktemp("memory"))


class SendingRank:
    """Has `num_lots` lots in GPU memory, where the handover asks for that."""

    def __init__(self, file: Path, *, num_lots: int = 0, why: str = "", dies: bool = False) -> None:
        self.file, self.num_lots, self.why, self.dies = file, num_lots, why, dies
        self.sends = True

    def send_weights(self, to: Handover) -> SentWeights:
        self.file.touch()
        if not self.sends:
            raise RuntimeError("gone")
        asks = to.on_one_machine and to.over_gpu_memory
        lots = ((PartOffset(0, 0),),) * self.num_lots if asks else ()
        return SentWeights((), self.file, 0, 1, (), to.on_one_machine, "handle" if lots else "", lots, self.why * asks)

    def fill_bucket(self, lot: int) -> None: ...

    def remove_weights(self) -> None:
        if self.dies:
            raise RuntimeError("gone")


class Receiving:
    def __init__(self, why: str = "") -> None:
        self.why = why

    def receive_weights(self, sent: Sequence[SentWeights], lot: int | None = None) -> str:
        return "" if lot is None else self.why


def pushed(tmp_path: Path, senders: list[SendingRank], why: str = "") -> tuple[Any, PushedWeights, list[str]]:
    ranks: Any = Ranks(senders)
    ranks.engines = Ranks([Receiving(why)])
    ranks.engines.log = ranks.log
    for worker in ranks.engines.workers:
        worker.calls = ranks.log
    said: list[str] = []
    return ranks, PushedWeights(ranks, Handover("run", tmp_path, on_one_machine=True), said.append), said


def operations(ranks: Any) -> list[str]:
    return [f"{name} {args[1]}" if len(args) > 1 else name for name, args in ranks.log]


@pytest.mark.parametrize("dies", [False, True])
def test_weights_are_published_before_the_first_sample_and_their_files_go_with_the_run(
    tmp_path: Path, dies: bool
) -> None:
    file = tmp_path / "weights-run-0"
    ranks, weights, said = pushed(tmp_path, [SendingRank(file, dies=dies)])
    weights.close()
    assert ranks.log == [], "nothing was published"
    weights.ensure_published()
    weights.ensure_published()
    weights.publish(1)
    assert operations(ranks) == ["send_weights", "receive_weights"] * 2
    weights.close()
    assert not file.exists()
    assert not said, "without a GPU there is nothing to fall back from"


def test_files_of_a_handover_that_a_rank_did_not_survive_go_with_the_run(tmp_path: Path) -> None:
    senders = [SendingRank(tmp_path / f"weights-run-{rank}", dies=True) for rank in range(2)]
    senders[1].sends = False
    _, weights, _ = pushed(tmp_path, senders)
    with pytest.raises(RuntimeError, match="gone"):
        weights.publish(1)
    weights.close()
    assert not list(tmp_path.iterdir())


def test_on_gpus_of_one_machine_engines_take_one_lot_after_another_out_of_the_ranks_memory(tmp_path: Path) -> None:
    """A rank that has fewer lots takes part in the calls of the others."""
    senders = [SendingRank(tmp_path / "0", num_lots=2), SendingRank(tmp_path / "1", num_lots=1)]
    ranks, weights, said = pushed(tmp_path, senders)
    weights.publish(1)
    fills = ["fill_bucket"] * 2
    assert operations(ranks) == ["send_weights"] * 2 + [*fills, "receive_weights 0", *fills, "receive_weights 1"]
    assert not said


@pytest.mark.parametrize("where", ["rank", "engine"])
def test_memory_that_cannot_be_shared_is_tried_once_and_files_are_used_from_then_on(tmp_path: Path, where: str) -> None:
    sender = SendingRank(tmp_path / "weights", num_lots=2, why="not permitted" if where == "rank" else "")
    ranks, weights, said = pushed(tmp_path, [sender], "not permitted" if where == "engine" else "")
    weights.publish(1)
    tried = ["fill_bucket", "receive_weights 0"] if where == "engine" else []
    assert operations(ranks) == ["send_weights", *tried, "receive_weights"]
    ranks.log.clear()
    weights.publish(2)
    assert operations(ranks) == ["send_weights", "receive_weights"]
    assert said == [f"weights go to the engines through files in {tmp_path}, not over CUDA IPC: not permitted"]
