"""Merging against peft's own merge, and what cannot be merged; a copy that cannot be made costs a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import randomise, tiny_model
from tiny_runs import save_model
from torch import nn

from posttrain.apps.export.merge_lora import MergedSource, open_adapter
from posttrain.apps.export.periodic_export import PeriodicExport
from posttrain.apps.export.weight_sources import SafetensorsSource
from posttrain.errors import InputError


def adapted(folder: Path, **settings: Any) -> tuple[nn.Module, Path, Path]:
    """A tiny model with random adapters; the folder of the base, the folder of the adapter."""
    model = tiny_model("llama")
    model.save_pretrained(folder / "base")
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    config = LoraConfig(task_type="CAUSAL_LM", **{**defaults, **settings})
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    randomise(nn.ParameterList(p for n, p in peft_model.named_parameters() if "lora_" in n), seed=3)
    peft_model.save_pretrained(str(folder / "adapter"))
    return peft_model, folder / "base", folder / "adapter"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 2, "1.mlp.up_proj": 3}, "alpha_pattern": {"q_proj": 9}},
    ],
    ids=["plain", "rslora", "some layers", "patterns"],
)
def test_merging_equals_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, base, adapter = adapted(tmp_path, **settings)
    merged = MergedSource(SafetensorsSource(base), open_adapter(adapter))
    expected = model.merge_and_unload().state_dict()  # type: ignore[operator]
    unmerged = load_file(base / "model.safetensors")
    changed = 0
    for name, tensor in merged.read(list(merged.facts)):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(tensor, unmerged[name])
    assert changed == len(open_adapter(adapter).modules) > 0


def rewrite(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"bias": "all"}, {"peft_type": "LOHA"}, {"r": 0}, {"lora_alpha": None}]
)
def test_other_adapters_than_plain_lora_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, _, adapter = adapted(tmp_path)
    rewrite(adapter, **settings)
    with pytest.raises(InputError, match=next(iter(settings))):
        open_adapter(adapter)


def test_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    _, _, adapter = adapted(tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    removed = next(name for name in tensors if "lora_B" in name)
    save_file({name: t for name, t in tensors.items() if name != removed}, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="has no counterpart"):
        open_adapter(adapter)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, _, adapter = adapted(tmp_path)
    tiny_model("llama", hidden_size=16).save_pretrained(tmp_path / "narrow")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    with pytest.raises(InputError, match=r"is for a weight of shape \[32, 48\], but that of the base"):
        MergedSource(SafetensorsSource(tmp_path / "narrow"), open_adapter(adapter))
    with pytest.raises(InputError, match=r"adapts model\.layers\.1\..*, which the base model .* does not have"):
        MergedSource(SafetensorsSource(tmp_path / "shallow"), open_adapter(adapter))


def test_weights_that_are_not_finite_are_saved_without_a_copy(tmp_path: Path) -> None:
    checkpoint = tmp_path / "tmp_step_8.1"
    shutil.copytree(save_model(tmp_path / "model"), checkpoint / "policy/weights/model")
    file = checkpoint / "policy/weights/model/model.safetensors"
    weights = load_file(file)
    warnings: list[str] = []
    state = torch.get_rng_state()
    PeriodicExport(warnings.append)(checkpoint)
    assert not warnings
    assert (checkpoint / "hf/model.safetensors").is_file()
    assert json.loads((checkpoint / "hf/conversion.json").read_text())["step"] == 8
    shutil.rmtree(checkpoint / "hf")

    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, file, metadata={"format": "pt"})
    PeriodicExport(warnings.append)(checkpoint)
    assert len(warnings) == 1
    assert "step_8 is saved without its copy in hf/: model.norm.weight of" in warnings[0]
    assert sorted(path.name for path in checkpoint.iterdir()) == ["policy"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_made_in_another_process_is_the_same(tmp_path: Path) -> None:
    checkpoint = tmp_path / "tmp_step_8"
    shutil.copytree(save_model(tmp_path / "model"), checkpoint / "policy/weights/model")
    warnings: list[str] = []
    export = PeriodicExport(warnings.append)
    export.beside(checkpoint, lambda: True)  # the run has failed
    assert not (checkpoint / "hf").exists()
    export.beside(checkpoint, lambda: False)
    made = {file.name: file.read_bytes() for file in (checkpoint / "hf").iterdir()}
    shutil.rmtree(checkpoint / "hf")
    export(checkpoint)
    assert made == {file.name: file.read_bytes() for file in (checkpoint / "hf").iterdir()}
    shutil.rmtree(checkpoint / "hf")
    assert not warnings

    (checkpoint / "policy/weights/model/model.safetensors").write_bytes(b"cut short")
    export.beside(checkpoint, lambda: False)
    assert len(warnings) == 1
    assert "step_8 is saved without its copy in hf/" in warnings[0]
    assert not (checkpoint / "hf").exists()
