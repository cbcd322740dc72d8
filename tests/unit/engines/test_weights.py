"""Weights for engines in other processes: the same bits arrive, damage is noticed, adapters travel alone."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from posttrain.config.policy import LoraConfig
from posttrain.engines import weights
from posttrain.engines.weights import Handover, SentWeights, WeightReceiver, WeightSender, checksum
from posttrain.errors import HardwareError
from posttrain.models.lora import add_lora


@pytest.fixture(autouse=True)
def _own_memory_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of /dev/shm, where tests in other processes write files of the same name."""
    monkeypatch.setattr(weights, "MEMORY_FOLDER", tmp_path_factory.mktemp("memory"))


@torch.no_grad()
def changed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter))
    return model


def adapted(seed: int) -> nn.Module:
    return add_lora(tiny_model(), LoraConfig(enabled=True, dim=4), seed)


def same_bits(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("on_one_machine", [True, False])
@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model().bfloat16(), lambda: adapted(0)])
def test_engines_have_the_trainers_bits_after_every_handover(make, on_one_machine: bool, tmp_path: Path) -> None:
    trained, sampled = make(), make()
    before = [parameter.data_ptr() for parameter in sampled.parameters()]
    sender, receiver = WeightSender(trained), WeightReceiver(sampled)
    for _ in range(2):
        changed(trained)
        assert not same_bits(sampled, trained)
        sent = sender.send(Handover(tmp_path.name, tmp_path, on_one_machine))
        assert receiver.receive([sent])
        assert same_bits(sampled, trained)
    assert [parameter.data_ptr() for parameter in sampled.parameters()] == before, "in place"
    sender.remove_file()
    assert not sent.file.exists()


def test_adapters_travel_without_the_model(tmp_path: Path) -> None:
    sent = WeightSender(changed(adapted(0))).send(Handover("run", tmp_path, on_one_machine=False))
    assert all("lora_" in part.name for part in sent.parts)
    assert WeightReceiver(adapted(1)).receive([sent])


def test_a_byte_that_changed_on_the_way_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    model = changed(tiny_model())
    sent = WeightSender(model).send(Handover("run", tmp_path, on_one_machine=False))
    name, begin = sent.parts[3].name, sent.places[3].begin
    with sent.file.open("r+b") as file:
        file.seek(begin + 5)
        (byte,) = file.read(1)
        file.seek(begin + 5)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(HardwareError, match=rf"{name}: checksum mismatch after weight transfer.*{sent.file}"):
        WeightReceiver(tiny_model()).receive([sent])


def test_a_file_is_read_only_once_its_weights_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started anew may come while a rank still copies."""
    sender, model = WeightSender(changed(tiny_model())), tiny_model()
    sent = sender.send(Handover("run", tmp_path, on_one_machine=False))
    later = replace(sent, number=sent.number + 1)
    monkeypatch.setattr(weights, "_COMPLETE_S", 0.01)
    with pytest.raises(HardwareError, match=f"{sent.file} is not complete 0 s after"):
        WeightReceiver(model).receive([later])
    assert WeightReceiver(model).receive([sent])


def test_files_of_ranks_that_a_killed_attempt_had_are_removed(tmp_path: Path) -> None:
    to = Handover("run", tmp_path, on_one_machine=False)
    stale, others = to.file(3, 1), Handover("another", tmp_path, on_one_machine=False).file(3, 1)
    for file in (stale, others):
        file.touch()
    sent = WeightSender(tiny_model()).send(to)
    assert sorted(tmp_path.iterdir()) == sorted([sent.file, others])


def test_a_file_that_another_rank_removes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks replace the files of a killed attempt side by side: one may be listed and gone."""
    monkeypatch.setattr(weights, "MEMORY_FOLDER", tmp_path)
    (tmp_path / "posttrain-weights-run-1").symlink_to("gone")
    assert Handover("run", Path("elsewhere"), on_one_machine=True).file(0, 1) == tmp_path / "posttrain-weights-run-0"


def test_a_disk_without_room_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_space = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(weights.os, "posix_fallocate", Mock(side_effect=no_space))
    with pytest.raises(OSError, match=r"No space left on device.*weights-run-0"):
        WeightSender(tiny_model()).send(Handover("run", tmp_path, on_one_machine=False))
    assert not list(tmp_path.iterdir())


# -- buckets that engines open -----------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Memory by its handle: CPUs take part as if they were GPUs that share theirs."""
    found: dict[str, torch.Tensor] = {}

    def handle_of(memory: torch.Tensor) -> str:
        found["bucket"] = memory
        return "bucket"

    monkeypatch.setattr(weights, "_is_on_gpu", lambda parts: True)
    monkeypatch.setattr(weights, "shareable_memory", nullcontext)
    monkeypatch.setattr(weights, "handle_of", handle_of)
    monkeypatch.setattr(weights, "open_handle", lambda handle, device: found[handle])
    monkeypatch.setattr(weights, "BUCKET_BYTES", 8 * 1024)
    return found


def hand_over(sender: WeightSender, receiver: WeightReceiver, to: Handover) -> SentWeights:
    sent = sender.send(to)
    assert len(sent.lots) > 1
    for lot in range(len(sent.lots)):
        sender.fill(lot)
        assert not receiver.open_buckets([sent])
        assert receiver.receive([sent], lot) == (lot == len(sent.lots) - 1), "all parts are there with the last lot"
    return sent


@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model().bfloat16(), lambda: adapted(0)])
def test_a_bucket_carries_the_same_bits_lot_by_lot(make, shared: dict[str, torch.Tensor], tmp_path: Path) -> None:
    trained, sampled, anew = make(), make(), make()
    sender, receiver = WeightSender(trained), WeightReceiver(sampled)
    for _ in range(2):
        changed(trained)
        sent = hand_over(sender, receiver, Handover("run", tmp_path, on_one_machine=True))
        assert same_bits(sampled, trained)
        assert WeightReceiver(anew).receive([sent]), "from the file"
        assert same_bits(anew, trained), "an engine that is started anew"
    total = sum(part.nbytes for part in trained.parameters())
    assert len(shared["bucket"]) < total, "it is filled several times"
    assert sender.send(Handover("run", tmp_path, on_one_machine=True, over_gpu_memory=False)).lots == ()
    sender.remove_file()


def test_a_bucket_that_was_changed_is_refused(shared: dict[str, torch.Tensor], tmp_path: Path) -> None:
    sender, receiver = WeightSender(changed(tiny_model())), WeightReceiver(tiny_model())
    sent = sender.send(Handover("run", tmp_path, on_one_machine=True))
    sender.remove_file()
    sender.fill(0)
    shared["bucket"][sent.lots[0][0].begin] ^= 1
    assert not receiver.open_buckets([sent])
    with pytest.raises(
        HardwareError, match=f"{sent.parts[0].name}: checksum mismatch after weight transfer.*bucket of a rank"
    ):
        receiver.receive([sent], 0)


def test_both_sides_say_why_memory_cannot_be_shared(
    shared: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=RuntimeError("CUDA error: operation not permitted\nmore"))
    to = Handover("run", tmp_path, on_one_machine=True)
    sender = WeightSender(tiny_model())
    with monkeypatch.context() as patched:
        patched.setattr(weights, "open_handle", refuse)
        why = WeightReceiver(tiny_model()).open_buckets([sender.send(to)])
        assert why.endswith("(CUDA error: operation not permitted)")
    sender.remove_file()
    monkeypatch.setattr(weights, "handle_of", refuse)
    sender = WeightSender(tiny_model())
    sent = sender.send(to)
    assert sent.why_no_bucket.endswith("(CUDA error: operation not permitted)")
    assert (sent.lots, sent.handle) == ((), "")
    sender.remove_file()


def test_a_checksum_tells_rows_apart() -> None:
    tensor = torch.randn(6, 4)
    assert int(checksum(tensor)) == int(checksum(tensor.clone()))
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3)), "bits, not values"


def test_weights_are_in_memory_only_where_there_is_room_on_the_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MEMORY_FOLDER", tmp_path / "memory")
    here, shared = Handover("run", tmp_path / "shared", True), tmp_path / "shared"
    assert here.file(0, 1).parent == shared, "there is no such folder"
    (tmp_path / "memory").mkdir()
    assert here.file(0, 1).parent == tmp_path / "memory"
    assert here.file(0, 2**60).parent == shared
    assert Handover("run", shared, on_one_machine=False).file(0, 1).parent == shared
    assert here.file(0, 1) != here.file(1, 1), "each rank has its own"
