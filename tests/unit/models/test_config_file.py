"""A config.json with values that no model has is refused by its field, before a library builds anything from it."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import PretrainedConfig

from posttrain.models import loading
from posttrain.models.accepted_names import ModelReferenceError, check_model_folder
from posttrain.models.hub import why_unavailable
from posttrain.models.loading import SettingsError, check_model_exists, load_model
from posttrain.models.lora import add_adapter

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 100, "eos_token_id": [2, 3]}


def folder_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "nonsense"),
        ("torch_dtype", 5),
        ("eos_token_id", "x"),
        ("eos_token_id", 10**9),
        ("eos_token_id", [2, -1]),
        ("hidden_size", 0),
        ("hidden_size", "8"),
        ("num_hidden_layers", 10**9),
        ("vocab_size", True),
        ("sliding_window", "x"),
        ("layer_types", 5),
        ("text_config", "x"),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_the_field_and_its_value_are_named(key: str, value: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, json.dumps({**LLAMA, key: value}))
    named, shown = ("num_hidden_layers", 10**9) if isinstance(value, dict) else (key, value)
    reason = why_unavailable(str(folder))
    assert reason is not None
    assert f"config.json: {named} is {shown!r}" in reason
    with pytest.raises(ModelReferenceError, match=f"{named} is "):
        check_model_folder(folder)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"hidden_size": ' + "1" * 5000 + "}", '{"a": 1, "a": 2}', "[]", ""])
def test_a_file_that_is_not_strict_json_is_refused(text: str, tmp_path: Path) -> None:
    assert "config.json" in (why_unavailable(str(folder_of(tmp_path, text))) or "")


@pytest.mark.parametrize(
    "change",
    [
        *({}, {"eos_token_id": None}, {"dtype": "bfloat16"}, {"sliding_window": None}),
        *({"_attn_implementation": "sdpa"}, {"experts_implementation": "grouped_mm"}),  # those of transformers
    ],
)
def test_ordinary_configs_are_accepted(change: dict[str, Any], tmp_path: Path) -> None:
    assert why_unavailable(str(folder_of(tmp_path, json.dumps({**LLAMA, **change})))) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_attn_implementation", "evil/kernel"),
        ("attn_implementation", "evil/kernel@main:forward"),
        ("_attn_implementation_internal", {"": "sdpa", "text_config": "evil/kernel"}),
        ("_attn_implementation", 5),
        ("_experts_implementation", "deepgemm"),
        ("experts_implementation", "evil/kernel"),
        ("text_config", {"_attn_implementation": "evil/kernel"}),
    ],
)
def test_code_to_fetch_from_the_hub_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    reason = why_unavailable(str(folder_of(tmp_path, json.dumps({**LLAMA, key: value}))))
    assert "code that would be fetched from the hub and run; remove the key" in (reason or "")


def test_the_config_of_a_model_on_the_hub_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {**LLAMA, "_attn_implementation": "evil/kernel"}
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda *args, **kwargs: (content, {}))
    monkeypatch.setattr(loading, "check_available", lambda *args, **kwargs: None)
    for load in (check_model_exists, lambda name: load_model(name, torch.float32, torch.device("cpu"))):
        with pytest.raises(SettingsError, match=r"config.json of 'owner/name': _attn_implementation is 'evil/kernel'"):
            load("owner/name")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_named_pipe_in_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder_of(tmp_path, json.dumps(LLAMA))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert f"{name}: a named pipe, not a file" in (why_unavailable(str(tmp_path)) or "")


def test_weights_that_are_more_than_tensors_are_refused_by_their_file(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"a": os.getcwd}, 2))
        archive.writestr("a/version", "3\n")
    with pytest.raises(SettingsError, match=r"pytorch_model.bin is damaged or holds more than tensors"):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"))


def test_an_adapter_that_is_more_than_tensors_is_refused_by_its_file(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps({"a": os.getcwd}))
    with pytest.raises(ModelReferenceError, match=r"adapter_model.bin is damaged or holds more than tensors"):
        add_adapter(tiny_model("llama"), tmp_path)
