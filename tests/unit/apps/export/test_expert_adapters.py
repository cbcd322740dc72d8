"""Adapters of experts: merged into the tensors of the files, written as vLLM loads them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from posttrain.apps.export.convert import ConversionSettings, convert
from posttrain.config.policy import LoraConfig
from posttrain.errors import InputError
from posttrain.models.lora import add_lora

FAMILIES = ["qwen3-moe", "mixtral", "deepseek-v3"]


def save_adapter(family: str, root: Path, **settings: Any) -> tuple[Any, Path]:
    """An adapted model, and the folder of its adapter; the base model is in root/base."""
    base = tiny_model(family, **settings)
    if not (root / "base").exists():
        base.save_pretrained(root / "base")
        byte_tokenizer().save_pretrained(root / "base")
    model: Any = add_lora(base, LoraConfig(enabled=True, dim=4, alpha=12), seed=0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(root / "base")
    model.save_pretrained(root / "adapter")
    return model, root / "adapter"


def merged_in_memory(model: Any) -> dict[str, Tensor]:
    """What peft merges, as the files of the family have it."""
    merged = model.merge_and_unload()
    return dict(revert_weight_conversion(merged, dict(merged.state_dict())))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_merged_as_peft_does(family: str, tmp_path: Path) -> None:
    model, adapter = save_adapter(family, tmp_path)
    convert(str(adapter), tmp_path / "merged", ConversionSettings(merge_lora=True), say=lambda _: None)
    written, expected = load_file(tmp_path / "merged" / "model.safetensors"), merged_in_memory(model)
    assert written.keys() == expected.keys()
    assert any(".experts.3." in name for name in written)
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_for_vllm_has_matrices_for_each_expert(family: str, tmp_path: Path) -> None:
    model, adapter = save_adapter(family, tmp_path)
    convert(str(adapter), tmp_path / "vllm", ConversionSettings(for_vllm=True), say=lambda _: None)
    factors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    base, expected = load_file(tmp_path / "base" / "model.safetensors"), merged_in_memory(model)
    adapted = {name.rpartition(".lora_")[0] for name in factors}
    assert any(name.startswith("base_model.model.model.layers.1.") and ".experts.3." in name for name in adapted)
    for module in adapted:
        a, b = factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] <= config["r"] == config["lora_alpha"]
        weight = f"{module.removeprefix('base_model.model.')}.weight"
        torch.testing.assert_close(base[weight] + b @ a, expected[weight], rtol=1e-5, atol=1e-5)


def test_an_adapter_of_another_number_of_experts_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    save_adapter("qwen3-moe", tmp_path)
    _, adapter = save_adapter("qwen3-moe", tmp_path, num_experts=8)
    with pytest.raises(InputError, match=r"experts.*lora_A.weight has the shape .* for each of 4 experts"):
        convert(str(adapter), tmp_path / "merged", ConversionSettings(merge_lora=True), say=lambda _: None)
    assert not (tmp_path / "merged").exists()
