"""A copy that cannot be made costs a warning, not the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_runs import save_model

from posttrain.apps.export.periodic_export import PeriodicExport


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
