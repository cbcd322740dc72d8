"""What `registry add` takes, and what it refuses before it writes anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from posttrain.apps.ship.registry import Registry, lineage
from posttrain.apps.ship.registry.model_folder import check_model_folder
from posttrain.checkpointing.integrity import seal
from posttrain.cli.main import main
from posttrain.errors import RegistryError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_weights(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.ones((8, 8), np.float32)}, file)


def make_plain(folder: Path) -> Path:
    write_weights(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def make_sharded(folder: Path) -> Path:
    for name in SHARDS:
        write_weights(folder / name)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {f"w{place}": name for place, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_adapter(folder: Path) -> Path:
    write_weights(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/on/another/machine"}))
    return folder


def make_checkpoint(step: Path) -> Path:
    make_plain(step / "policy" / "weights" / "model")
    (step / "policy" / "tokenizer").mkdir()
    (step / "policy" / "tokenizer" / "tokenizer.json").write_text("{}")
    (step / "policy" / "optimizer").mkdir()
    (step / "policy" / "optimizer" / "state.pt").write_text("moments")
    (step / "policy" / "model.json").write_text("{}")
    (step / "config.yaml").write_text("policy:\n  model_name: base/model\n")
    (step / "training_info.json").write_text("{}")
    seal(step)
    return step


def add(registry: Registry, folder: Path, *words: str) -> int:
    return main(["registry", "add", "m", str(folder), "--registry", str(registry.location.folder), *words])


def refused(registry: Registry, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The message for a folder that is refused. Nothing must have been written."""
    assert registry.location.folder is not None
    before = sorted(registry.location.folder.rglob("*"))
    for words in ((), ("--in-place",)):
        assert add(registry, folder, *words) == 64
    assert sorted(registry.location.folder.rglob("*")) == before
    assert registry.names() == []
    return capsys.readouterr().err


def make_without_checksums(step: Path) -> Path:
    """Written by another system."""
    make_plain(step / "policy" / "weights" / "model")
    return step


def make_without_optimizer(step: Path) -> Path:
    (make_checkpoint(step) / "policy" / "optimizer" / "state.pt").unlink()
    return step


@pytest.mark.parametrize(
    "make",
    [make_plain, make_sharded, make_adapter, make_checkpoint, make_without_checksums, make_without_optimizer],
)
def test_complete_models_are_accepted(registry: Registry, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    assert add(registry, make(tmp_path / "step_3")) == 0
    assert registry.verify(registry.get("m", 1)) == []


def test_a_folder_without_a_model_is_refused(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    said = refused(registry, tmp_path / "data", capsys)
    assert f"{tmp_path / 'data'} is a folder without config.json" in said
    assert "expected a Hugging Face folder, a peft adapter or a checkpoint step_N" in said
    assert "no such folder" in refused(registry, tmp_path / "nowhere", capsys)
    assert "a file" in refused(registry, tmp_path / "data" / "train.jsonl", capsys)


@pytest.mark.timeout(60)  # a pipe must not block
@pytest.mark.parametrize(
    ("make", "harm", "words"),
    [
        (make_plain, lambda folder: os.mkfifo(folder / "pipe"), "pipe: a named pipe, not a file"),
        (make_plain, lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
        (make_sharded, lambda folder: (folder / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
        (make_adapter, lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (make_checkpoint, lambda folder: (folder / "checksums.json").unlink(), "never completed"),
    ],
)
def test_an_incomplete_model_is_refused_with_the_file(
    registry: Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    harm: Callable[[Path], object],
    words: str,
) -> None:
    folder = make(tmp_path / "step_3")
    harm(folder)
    assert words in refused(registry, folder, capsys)


@pytest.mark.parametrize("num_bytes", [0, 5, 40, -1])
@pytest.mark.parametrize("make", [make_plain, make_sharded, make_adapter])
def test_a_truncated_file_is_named(
    registry: Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    num_bytes: int,
) -> None:
    file = sorted(make(tmp_path / "model").glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert f"{file} is cut short or no safetensors file" in refused(registry, file.parent, capsys)


@pytest.mark.parametrize(
    "name", ["policy/weights/model/model.safetensors", "policy/tokenizer/tokenizer.json", "config.yaml"]
)
def test_modified_checkpoint_is_refused(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    step = make_checkpoint(tmp_path / "step_3")
    content = (step / name).read_bytes()
    (step / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the size stays
    said = refused(registry, step, capsys)
    assert f"{step} is not what was saved: {name} is not what was saved: its SHA-256 differs" in said


def test_the_folder_of_a_run_is_refused_and_its_newest_checkpoint_named(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for number in (3, 20):
        make_checkpoint(run / f"step_{number}")
    said = refused(registry, run, capsys)
    assert f"{run} is the folder of a run, not one model" in said
    assert f"posttrain registry add NAME {run / 'step_20'}" in said
    inner = run / "step_3" / "policy" / "weights" / "model"
    assert f"{inner} is a part of a checkpoint: {run / 'step_3'}" in refused(registry, inner, capsys)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("TOPSECRET")
    model = make_plain(tmp_path / "model")
    (model / "NOTES.md").symlink_to(tmp_path / "secret")
    assert main(["registry", "add", "m", str(model), "--registry", str(tmp_path / "registry")]) == 64
    assert f"NOTES.md: a link to {tmp_path / 'secret'}, outside of" in capsys.readouterr().err
    assert not (tmp_path / "registry" / "artifacts").exists()


def test_links_within_the_folder_and_those_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    write_weights(repository / "blobs" / "abc")
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "also.safetensors").symlink_to("model.safetensors")
    check_model_folder(snapshot)


def test_a_folder_of_data_without_end_is_not_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(lineage, "MAX_DATA_FILES", 5)
    for number in range(6):
        (tmp_path / f"{number}").write_text("")
    assert lineage._hash_of(str(tmp_path), is_given=False) is None
    assert "has more than 5 files" in capsys.readouterr().err
    with pytest.raises(RegistryError, match=r"--data .* has more than 5 files"):
        lineage._hash_of(str(tmp_path), is_given=True)
