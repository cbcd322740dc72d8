"""Models with towers for images around a language model, used for text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoConfig

from posttrain.models.hub import processor_files
from posttrain.models.loading import auto_class_of, load_model


@pytest.mark.parametrize("family", ["qwen3.5-vision", "mistral3-vision", "gemma4-vision"])
def test_towers_are_loaded_and_frozen_and_a_line_says_so(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tiny_model(family)
    saved.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    assert type(model) is type(saved)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - trained
    assert trained
    assert all("language_model" in name or name == "lm_head.weight" for name in trained)
    assert frozen
    assert not any("language_model" in name for name in frozen)
    said = capsys.readouterr().err
    assert "used for text alone" in said
    assert f"({sum(model.get_parameter(name).numel() for name in frozen):,} weights)" in said


def test_the_language_model_alone_is_loaded_where_the_config_names_it(tmp_path: Path) -> None:
    tiny_model("qwen3.5-vision").save_pretrained(tmp_path)
    assert auto_class_of(AutoConfig.from_pretrained(tmp_path)).__name__ == "AutoModelForImageTextToText"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3_5ForCausalLM"]}))
    assert auto_class_of(AutoConfig.from_pretrained(tmp_path)).__name__ == "AutoModelForCausalLM"


def test_files_of_a_processor_are_found_in_a_folder(tmp_path: Path) -> None:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in processor_files(str(tmp_path))] == [
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    ]
