"""Sizes of models: every weight is counted, and what cannot be counted is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_reward_models import tiny_reward_model

from posttrain.config import LoraConfig
from posttrain.models.lora import add_lora
from posttrain.policy.memory.model_shape import (
    NAMED_CONFIGS,
    NAMED_SHAPES,
    UnknownModelError,
    find_shape,
    shape_of_config,
)

REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "cohere"]
)
def test_the_weights_of_a_family_are_counted_one_by_one(family: str) -> None:
    model = tiny_model(family)
    shape = shape_of_config(family, model.config.to_dict())
    expected = sum(parameter.numel() for parameter in model.parameters())
    if family == "cohere":  # one norm for attention and MLP
        expected += shape.layers * shape.hidden
    assert shape.num_weights == expected


def test_biases_that_a_config_asks_for_are_counted() -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    assert shape_of_config("x", model.config.to_dict()).num_weights == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_reward_model_has_one_table(family: str) -> None:
    model = tiny_reward_model(family)
    shape = shape_of_config(family, model.config.to_dict()).without_output_table()
    assert shape.num_weights == sum(p.numel() for n, p in model.named_parameters() if not n.startswith("score"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapters_are_those_that_training_makes(family: str) -> None:
    model = tiny_model(family)
    shape = shape_of_config(family, model.config.to_dict())
    adapted = add_lora(model, LoraConfig(enabled=True, dim=4), 0)
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sum(kind.num_weights for kind in shape.adapters(4)) == expected


def test_named_shapes_are_those_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import shapes

    monkeypatch.delitem(sys.modules, "shapes")
    assert set(shapes.SHAPES) - {*NAMED_SHAPES, *NAMED_CONFIGS} == {"tiny", "llama-small", "gpt-oss-20b"}
    for name, shape in NAMED_SHAPES.items():
        assert shape_of_config(name, shapes.SHAPES[name].config()) == shape
        assert shape.num_weights == shapes.num_parameters(name)


def test_a_folder_is_read_without_its_weights(tmp_path: Path) -> None:
    config = tiny_model("qwen2").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(str(tmp_path)).layers == config["num_hidden_layers"]
    assert find_shape(str(tmp_path), {"num_hidden_layers": 7}).layers == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8}, "mixture of 8 experts"),
        ({"layer_types": ["linear_attention"]}, "without attention"),
        ({"intermediate_size": None}, "has no intermediate_size"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UnknownModelError, match=words):
        shape_of_config("other", {**tiny_model("llama").config.to_dict(), **change})


def test_unknown_name_lists_what_is_accepted() -> None:
    with pytest.raises(UnknownModelError, match=r"no folder 'nothing'.*llama-8b"):
        find_shape("nothing")
