"""Sampling and training in FP8 in a config: what they turn on, and what is said about them."""

from __future__ import annotations

import pytest

from posttrain.config import load_config

FP8 = "policy.generation.native_cfg.precision=fp8"
TRAINING = "policy.fp8=true"
CORRECTION = "loss_fn.use_importance_sampling_correction"


def test_samples_of_another_precision_are_corrected_for_by_default() -> None:
    assert not load_config("grpo").config.loss_fn.use_importance_sampling_correction
    loaded = load_config("grpo", None, [FP8])
    assert loaded.config.loss_fn.use_importance_sampling_correction
    assert loaded.origins[CORRECTION] == "policy.generation.native_cfg.precision: fp8", "the printed config says why"
    assert not loaded.warnings


@pytest.mark.parametrize(
    ("settings", "where"), [([FP8], "sampler"), ([TRAINING], "trainer"), ([FP8, TRAINING], "sampler")]
)
def test_turning_the_correction_off_is_a_warning(settings: list[str], where: str) -> None:
    loaded = load_config("grpo", None, [*settings, f"{CORRECTION}=false"])
    assert not loaded.config.loss_fn.use_importance_sampling_correction
    (warning,) = loaded.warnings
    assert warning.startswith(CORRECTION)
    assert f"with the {where} in FP8" in warning


def test_training_in_fp8_beside_a_sampler_in_bf16_is_corrected_for_by_default() -> None:
    loaded = load_config("grpo", None, [TRAINING])
    assert loaded.config.loss_fn.use_importance_sampling_correction
    assert loaded.origins[CORRECTION] == "policy.fp8: true"
    for kind in ("sft", "dpo", "rm"):
        assert load_config(kind, None, [TRAINING, "data.train.data_path=rows.jsonl"]).config.policy.fp8


def test_fp8_of_megatron_is_not_used_and_ours_is_named() -> None:
    loaded = load_config("grpo", None, ["policy.megatron_cfg.fp8_cfg.enabled=true"])
    assert not loaded.config.policy.fp8
    assert any("policy.fp8=true trains in FP8" in warning for warning in loaded.warnings)


@pytest.mark.parametrize("setting", ["kv_cache_dtype=fp8", "num_last_layers_in_bf16=1"])
def test_parts_of_fp8_without_it_are_mentioned(setting: str) -> None:
    key = f"policy.generation.native_cfg.{setting}"
    assert any("native_cfg.precision = fp8" in warning for warning in load_config("grpo", None, [key]).warnings)
    assert not load_config("grpo", None, [FP8, key]).warnings
