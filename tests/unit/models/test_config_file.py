"""A config.json with values that no model has is refused by its field, before a library builds anything from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.accepted_names import ModelReferenceError, check_model_folder
from posttrain.models.hub import why_unavailable

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


@pytest.mark.parametrize("change", [{}, {"eos_token_id": None}, {"dtype": "bfloat16"}, {"sliding_window": None}])
def test_ordinary_configs_are_accepted(change: dict[str, Any], tmp_path: Path) -> None:
    assert why_unavailable(str(folder_of(tmp_path, json.dumps({**LLAMA, **change})))) is None
