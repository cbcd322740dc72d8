"""Layers that predict further tokens, which transformers does not load, through checkpoints and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor

from posttrain.apps.export.convert import ConversionSettings, convert
from posttrain.config.policy import LoraConfig
from posttrain.models.loading import load_model
from posttrain.models.lora import add_lora
from posttrain.policy.checkpoint.files import WEIGHTS, load
from posttrain.policy.checkpoint.writer import CheckpointWriter

# A dense family, one whose files have other tensors than the model, and one whose drafts are a layer behind the last.
NAMES = {
    "qwen3.5": "mtp.layers.0.self_attn.q_proj.weight",
    "qwen3-next": "mtp.layers.0.mlp.experts.1.gate_proj.weight",
    "deepseek-v3": "model.layers.61.self_attn.o_proj.weight",
}


def saved(family: str, folder: Path) -> dict[str, Tensor]:
    """A published model: the drafts are in a file of their own."""
    tiny_model(family).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    drafts = {NAMES[family]: torch.randn(6, 4).bfloat16(), f"{NAMES[family]}_of_another_type": torch.randn(3)}
    save_file(drafts, folder / "model-mtp.safetensors", {"format": "pt"})
    return drafts


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_kept(folder: Path, drafts: dict[str, Tensor]) -> None:
    found = tensors(folder)
    for name, draft in drafts.items():
        assert found[name].dtype == draft.dtype
        assert torch.equal(found[name], draft)


@pytest.mark.parametrize("family", NAMES)
def test_checkpoints_and_exports_keep_them(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = saved(family, tmp_path / "base")
    model = load_model(str(tmp_path / "base"), torch.float32, torch.device("cpu"))
    assert f"2 tensors of layers that predict further tokens ({NAMES[family]}" in capsys.readouterr().err
    first = next(iter(dict(model.named_parameters()).items()))
    first[1].data.add_(1.0)
    CheckpointWriter(model, byte_tokenizer(), None, torch.device("cpu")).save(tmp_path, optimizer=False)
    assert_kept(tmp_path / WEIGHTS, drafts)
    again = load_model(str(tmp_path / "base"), torch.float32, torch.device("cpu"))
    load(tmp_path, again, byte_tokenizer(), None)
    assert torch.equal(again.get_parameter(first[0]), first[1])
    convert(str(tmp_path / WEIGHTS), tmp_path / "export", ConversionSettings(), say=print)
    assert_kept(tmp_path / "export", drafts)
    names = [tensors(tmp_path / part).keys() for part in ("base", WEIGHTS, "export")]
    assert names[0] == names[1] == names[2]


def test_merged_adapters_keep_those_of_the_base(tmp_path: Path) -> None:
    drafts = saved("qwen3.5", tmp_path / "base")
    model = load_model(str(tmp_path / "base"), torch.float32, torch.device("cpu"))
    adapted = add_lora(model, LoraConfig(enabled=True, dim=2), seed=0)
    CheckpointWriter(adapted, byte_tokenizer(), None, torch.device("cpu")).save(tmp_path, optimizer=False)
    assert not tensors(tmp_path / WEIGHTS).keys() & drafts.keys()
    convert(str(tmp_path / WEIGHTS), tmp_path / "export", ConversionSettings(merge_lora=True), say=print)
    assert_kept(tmp_path / "export", drafts)
