"""Experts of a model or of an adapter that do not fit are refused by the name of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor

from posttrain.config.policy import LoraConfig
from posttrain.models.accepted_names import ModelReferenceError
from posttrain.models.loading import SettingsError, load_model
from posttrain.models.lora import add_adapter, add_lora

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


def remove(weights: dict[str, Tensor]) -> None:
    del weights[NAME]


def cut(weights: dict[str, Tensor]) -> None:
    weights[NAME] = weights[NAME][:5].contiguous()


@pytest.mark.parametrize(("damage", "found"), [(remove, "is missing"), (cut, r"has the shape \[5, 32\]")])
def test_an_expert_that_differs_from_the_others_is_named(
    damage: Callable[[dict[str, Tensor]], None], found: str, tmp_path: Path
) -> None:
    tiny_model("qwen3-moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=rf"{NAME} {found}, and those of other experts have \[16, 32\]"):
        load_model(str(tmp_path), torch.float32, CPU)


def test_an_adapter_of_another_number_of_experts_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    larger = tiny_model("qwen3-moe", num_experts=8)
    add_lora(larger, LoraConfig(enabled=True, dim=4), seed=0).save_pretrained(tmp_path)
    with pytest.raises(ModelReferenceError, match=r"does not fit its base model: .*layers.0.mlp.experts.*lora_A"):
        add_adapter(tiny_model("qwen3-moe"), tmp_path)
