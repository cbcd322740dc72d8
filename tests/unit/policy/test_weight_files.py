"""Weights for engines in other processes: the same bits arrive, damage is noticed, adapters travel alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from posttrain.config.policy import LoraConfig
from posttrain.errors import HardwareError
from posttrain.models.lora import add_lora
from posttrain.policy import weight_files
from posttrain.policy.weight_files import Handover, WeightReceiver, WeightSender, checksum


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
def test_engines_have_the_trainers_bits_after_every_handover(make, on_one_machine: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trained, sampled = make(), make()
    before = [parameter.data_ptr() for parameter in sampled.parameters()]
    sender, receiver = WeightSender(trained), WeightReceiver(sampled)
    for _ in range(2):
        changed(trained)
        assert not same_bits(sampled, trained)
        sent = sender.send(Handover(tmp_path.name, tmp_path, on_one_machine))
        assert sent is not None
        receiver.receive(sent)
        assert same_bits(sampled, trained)
    assert [parameter.data_ptr() for parameter in sampled.parameters()] == before, "in place"
    sender.remove_file()
    assert not sent.file.exists()


def test_adapters_travel_without_the_model(tmp_path: Path) -> None:
    sent = WeightSender(changed(adapted(0))).send(Handover("run", tmp_path, on_one_machine=False))
    assert sent is not None
    assert all("lora_" in name for name in sent.tensors)
    other = adapted(1)
    WeightReceiver(other).receive(sent)


def test_a_byte_that_changed_on_the_way_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    model = changed(tiny_model())
    sent = WeightSender(model).send(Handover("run", tmp_path, on_one_machine=False))
    assert sent is not None
    name, tensor = list(sent.tensors.items())[3]
    with sent.file.open("r+b") as file:
        file.seek(tensor.begin + 5)
        (byte,) = file.read(1)
        file.seek(tensor.begin + 5)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(HardwareError, match=rf"{name} arrived changed in the engine: .*{sent.file}"):
        WeightReceiver(tiny_model()).receive(sent)


def test_a_checksum_tells_rows_apart() -> None:
    tensor = torch.randn(6, 4)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3)), "bits, not values"


def test_weights_are_in_memory_only_where_there_is_room_on_the_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "MEMORY_FOLDER", tmp_path / "memory")
    here, shared = Handover("run", tmp_path / "shared", True), tmp_path / "shared"
    assert here.file(1).parent == shared, "there is no such folder"
    (tmp_path / "memory").mkdir()
    assert here.file(1).parent == tmp_path / "memory"
    assert here.file(2**60).parent == shared
    assert Handover("run", shared, on_one_machine=False).file(1).parent == shared
