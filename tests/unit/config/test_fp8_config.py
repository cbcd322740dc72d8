"""Sampling in FP8 in a config: what it turns on, and what is said about it."""

from __future__ import annotations

import pytest

from posttrain.config import load_config

FP8 = "policy.generation.native_cfg.precision=fp8"
CORRECTION = "loss_fn.use_importance_sampling_correction"


def test_samples_of_another_precision_are_corrected_for_by_default() -> None:
    assert not load_config("grpo").config.loss_fn.use_importance_sampling_correction
    loaded = load_config("grpo", None, [FP8])
    assert loaded.config.loss_fn.use_importance_sampling_correction
    assert loaded.origins[CORRECTION] == "policy.generation.native_cfg.precision: fp8", "the printed config says why"
    assert not loaded.warnings


def test_turning_the_correction_off_is_a_warning() -> None:
    loaded = load_config("grpo", None, [FP8, f"{CORRECTION}=false"])
    assert not loaded.config.loss_fn.use_importance_sampling_correction
    assert [warning for warning in loaded.warnings if warning.startswith(CORRECTION)]


@pytest.mark.parametrize("setting", ["kv_cache_dtype=fp8", "num_last_layers_in_bf16=1"])
def test_parts_of_fp8_without_it_are_mentioned(setting: str) -> None:
    key = f"policy.generation.native_cfg.{setting}"
    assert any("nothing is quantised" in warning for warning in load_config("grpo", None, [key]).warnings)
    assert not load_config("grpo", None, [FP8, key]).warnings
