"""Models without formulas, experts and recurrent layers: their modules are counted, and the plan knows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from tiny_runs import grpo, save_data

import posttrain.engines.native.engine as engine_module
from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.plan import estimate_run
from posttrain.apps.plan.proposal import explain
from posttrain.cli.main import main
from posttrain.config import LoraConfig, load_config
from posttrain.engines.native import NativeSettings
from posttrain.engines.native.engine import check_states
from posttrain.engines.native.forward import ForwardPass
from posttrain.errors import ExitCode
from posttrain.models.loading import flops_per_token
from posttrain.models.lora import add_lora
from posttrain.policy.memory.model_shape import ModelShape, find_shape

FAMILIES = ["qwen3-moe", "qwen3.5", "nemotron-h", "deepseek-v3", "lfm2", "gpt-oss", "granite-hybrid", "qwen3.5-vision"]


def shape_of(family: str, folder: Path) -> ModelShape:
    model = tiny_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return find_shape(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_modules_and_of_the_engine(family: str, tmp_path: Path) -> None:
    shape, model = shape_of(family, tmp_path), tiny_model(family)
    assert shape.counted is not None
    assert shape.num_weights + shape.tower.num_weights == model.num_parameters()
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    stored = ForwardPass(model).shapes()
    assert shape.counted.cached * 4 == sum(layer.bytes_per_token for layer in stored.layers.values())
    assert shape.state_bytes(element=4) == stored.state_bytes
    multiplied = shape.layer_products + shape.head_products
    vectors = sum(kind.num_weights for kind in shape.tensors if kind.columns is None)
    windows = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Conv1d))
    assert flops_per_token(model) == pytest.approx(6 * (multiplied + vectors + windows), rel=0.05)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_adapters_are_those_that_training_makes(family: str, tmp_path: Path) -> None:
    shape = shape_of(family, tmp_path)
    adapted = add_lora(tiny_model(family), LoraConfig(enabled=True, dim=4), 0)
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sum(kind.num_weights for kind in shape.adapters(4)) == expected


@pytest.mark.parametrize(
    ("name", "billions", "active", "state_mib", "cached_kib"),
    [("qwen-30b-a3b", 30.5, 3.0, 0, 96), ("qwen-80b-a3b", 79.7, 3.6, 73.7, 24), ("qwen-hybrid-4b", 4.2, 4.2, 49.1, 32)],
)
def test_models_of_today_have_their_sizes(
    name: str, billions: float, active: float, state_mib: float, cached_kib: float
) -> None:
    shape = find_shape(name)
    assert shape.num_weights / 1e9 == pytest.approx(billions, abs=0.05)
    assert (shape.layer_products + shape.head_products) / 1e9 == pytest.approx(active, abs=0.05)
    assert shape.state_bytes(element=2) / 2**20 == pytest.approx(state_mib, abs=0.05)
    assert shape.counted is not None
    assert 2 * shape.counted.cached / 2**10 == cached_kib


def test_latent_vectors_are_counted_in_the_cache_and_heads_in_training(tmp_path: Path) -> None:
    shape = shape_of("deepseek-v3", tmp_path)
    assert shape.counted is not None
    assert shape.counted.cached == 2 * (12 + 4)
    assert shape.kv_width == 4 * (12 + 6) // 2
    assert shape.keeps_latents
    assert not find_shape("qwen-hybrid-4b").keeps_latents
    assert not find_shape("llama-8b").keeps_latents


def test_few_rows_read_few_experts() -> None:
    shape = find_shape("qwen-30b-a3b")
    assert shape.counted is not None
    dense = shape.layer_weights - shape.counted.expert_weights
    assert shape.weights_read(1) == pytest.approx(dense + shape.counted.expert_weights * 8 / 128)
    assert shape.weights_read(512) == pytest.approx(shape.layer_weights)


def test_states_of_a_batch_are_counted_and_limit_it() -> None:
    settings = ["policy.model_name=qwen-hybrid-4b", "policy.max_total_sequence_length=1024"]
    lora = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.generation.native_cfg.max_batch_size=512"]
    config = load_config("grpo", None, [*settings, *lora]).config
    found = estimate_run(config, GPUS["h200"])
    sampling = next(phase for phase in found.memory.phases if phase.name == "sampling")
    assert sampling.items["recurrent states"] == pytest.approx(521 * found.shape.state_bytes(element=2))
    small = estimate_run(config, GPUS["a100-40gb"])
    assert small.memory.cache is not None
    assert 0 < (small.memory.cache.max_rows or 0) < 512, "the others wait"
    tiny = estimate_run(load_config("grpo", None, settings).config, GPUS["a100-40gb"])
    assert "states of recurrent layers" in explain(tiny) or "optimizer" in explain(tiny)


def test_a_state_too_large_for_the_memory_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tmp_path / "model", byte_tokenizer()
    tiny_model("qwen3.5", vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    state = ForwardPass(tiny_model("qwen3.5", vocab_size=len(tokenizer))).shapes().state_bytes
    monkeypatch.setattr(engine_module, "available_bytes", lambda: 2 * 50 * state)
    data = save_data(tmp_path / "data")
    command = [*grpo(model, data, tmp_path / "run", steps=1), "--quiet"]
    assert main(command) == ExitCode.BAD_INPUT
    assert "max_batch_size = 42 fits" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    check_states(torch.device("cpu"), NativeSettings(max_batch_size=42), state)


def test_what_transformers_does_not_have_is_refused_with_both_reasons(tmp_path: Path) -> None:
    config = {**tiny_model("mixtral").config.to_dict(), "model_type": "unheard_of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mixture of 4 experts, which no formula counts"):
        find_shape(str(tmp_path))
