"""The keys and the arithmetic of a row of metrics.jsonl; docs/metrics.md explains every key."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_groups import group

from posttrain.recipes.dpo import DpoRecipe
from posttrain.recipes.grpo import GrpoRecipe
from posttrain.recipes.rm import RewardModelRecipe
from posttrain.recipes.sft import SftRecipe
from posttrain.reporting.chart_specs import CHARTS
from posttrain.reporting.rows import Hardware, performance, top_level_stages, training_row, validation_row
from posttrain.types import StepReport


def test_throughput_reproduces_the_published_nemo_rl_step() -> None:
    # The step that NeMo RL's users publish: 16 GPUs, 2,048 samples, 122.87 s; tokens follow from 17,395.32 tokens/s.
    timings = {
        "total_step_time": 122.87,
        "generation": 39.05,
        "policy_training": 16.89,
        "policy_and_reference_logprobs": 7.74,
    }
    tokens = round(17395.32 * 122.87)
    rates = performance(StepReport({}, timings, (), tokens, 2048), Hardware(16))
    assert rates["samples_per_sec_per_gpu"] == pytest.approx(1.04, abs=0.005)
    assert rates["tokens_per_sec_per_gpu"] == pytest.approx(1087.21, rel=1e-4)
    assert rates["policy_training_tokens_per_sec_per_gpu"] == pytest.approx(7908.96, rel=1e-3)
    assert rates["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] == pytest.approx(17251.90, rel=1e-3)
    assert rates["training_worker_group_tokens_per_sec_per_gpu"] == pytest.approx(5422.89, rel=1e-3)
    assert rates["generation_tokens_per_sec_per_gpu"] == pytest.approx(3420.66, rel=1e-3)


@pytest.mark.parametrize(("num_generated", "rate"), [(8.0, 100.0), (2.0, 25.0), (0.0, None)])
def test_generation_rate_counts_what_the_step_sampled(num_generated: float, rate: float | None) -> None:
    """A step of asynchronous GRPO trains on 8 sampled tokens, of which earlier steps have sampled some."""
    groups = (group(0, [0.0, 1.0], lengths=[4, 4]),)
    report = StepReport({"num_generated_tokens": num_generated}, {"generation": 1.0}, groups, 100, 2)
    assert performance(report, Hardware(1)).get("generation_tokens_per_sec_per_gpu") == rate


def test_flops_are_tera_per_device_and_mfu_is_a_share_of_the_peak() -> None:
    report = StepReport({}, {"policy_training": 2.0}, (), num_tokens=1000, num_samples=10)
    rates = performance(report, Hardware(4, peak_flops_per_device=1e13, flops_per_token=8e9))
    assert rates["train_flops_per_gpu"] == pytest.approx(8e9 * 1000 / 2.0 / 4 / 1e12)
    assert rates["train_mfu"] == pytest.approx(8e9 * 1000 / 2.0 / 4 / 1e13)
    assert "train_mfu" not in performance(report, Hardware(4, None, 8e9))
    assert "train_flops_per_gpu" not in performance(report, Hardware(4, 1e13, None))


def test_rates_of_training_count_the_samples_that_it_computed() -> None:
    report = StepReport({}, {"policy_training": 2.0}, (), num_tokens=1000, num_samples=10, num_trained_tokens=300)
    rates = performance(report, Hardware(1, peak_flops_per_device=1e13, flops_per_token=8e9))
    assert rates["policy_training_tokens_per_sec_per_gpu"] == 150
    assert rates["train_mfu"] == pytest.approx(8e9 * 150 / 1e13)
    assert rates["training_worker_group_tokens_per_sec_per_gpu"] == 500
    none = performance(replace(report, num_trained_tokens=0), Hardware(1, 1e13, 8e9))
    assert not {"policy_training_tokens_per_sec_per_gpu", "train_mfu"} & none.keys()


def test_stage_that_did_not_run_has_no_rate() -> None:
    rates = performance(StepReport({}, {"policy_training": 2.0, "generation": 0.0}, (), 1000, 0), Hardware(1))
    assert set(rates) == {
        "tokens_per_sec_per_gpu",
        "policy_training_tokens_per_sec_per_gpu",
        "training_worker_group_tokens_per_sec_per_gpu",
    }
    assert performance(StepReport({}, {}), Hardware(1)) == {}


def test_total_is_the_sum_of_top_level_stages() -> None:
    timings = {
        "generation": 4.0,
        "policy_training": 2.0,
        "policy_training/sharding_data": 0.5,
        "prepare_for_generation/total": 1.0,
        "prepare_for_generation/transfer_and_update_weights": 0.75,
        "idle/a": 0.25,
    }
    assert sum(top_level_stages(timings).values()) == 4.0 + 2.0 + 1.0 + 0.25
    in_background = {**timings, "checkpoint_write": 40.0}
    assert top_level_stages(in_background) == top_level_stages(timings), "it takes no time of the step"
    row = training_row(1, StepReport({}, timings), Hardware(1))
    assert row["timing/train/total_step_time"] == 7.25
    measured = training_row(1, StepReport({}, timings | {"total_step_time": 9.0}), Hardware(1))
    assert measured["timing/train/total_step_time"] == 9.0


def test_keys_have_nemo_rl_prefixes_and_values_are_python_numbers() -> None:
    report = StepReport({"loss": torch.tensor(0.25), "unscored": 3, "reward": 0.1 + 0.2}, {"generation": 1.5})
    row = training_row(5, report, Hardware(1))
    assert row == {
        "step": 5,
        "train/loss": 0.25,
        "train/unscored": 3,
        "train/reward": 0.30000000000000004,
        "timing/train/generation": 1.5,
        "timing/train/total_step_time": 1.5,
    }
    assert type(row["train/loss"]) is float
    assert type(row["train/unscored"]) is int
    assert validation_row(0, StepReport({"accuracy": 0.5}, {"generation": 2.0})) == {
        "step": 0,
        "validation/accuracy": 0.5,
        "timing/validation/generation": 2.0,
        "timing/validation/total_validation_time": 2.0,
    }


def test_non_finite_metric_is_null_in_the_file_and_named_once(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    for step in (1, 2):
        recorder.record_step(step, report(step, kl_penalty=math.nan, grad_norm=math.inf), None)
    assert [(row["train/kl_penalty"], row["train/grad_norm"]) for row in bench.rows()] == [(None, None)] * 2
    assert bench.output.count("train/kl_penalty is nan at step 1") == 1
    assert bench.output.count("train/grad_norm is inf") == 1
    assert "NaN" not in (bench.folder / "metrics.jsonl").read_text()


def test_floats_are_read_back_exactly(bench: Any, report: Any) -> None:
    values = [1 / 3, 1e-300, 0.1 + 0.2, float(torch.tensor(0.1)), -0.0]
    recorder = bench.recorder()
    for step, value in enumerate(values, start=1):
        recorder.record_step(step, report(step, loss=value), None)
    assert [row["train/loss"].hex() for row in bench.rows()] == [value.hex() for value in values]


PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_every_metric_shown_by_name_is_documented() -> None:
    timings = {"generation": 1.0, "policy_training": 1.0, "policy_and_reference_logprobs": 1.0}
    shown = [recipe.presentation for recipe in (GrpoRecipe, DpoRecipe, RewardModelRecipe, SftRecipe)]
    keys = {f"train/{metric.key}" for presentation in shown for metric in presentation.results}
    keys |= {key for chart in (*CHARTS, *(one.headline.chart for one in shown)) for key in chart.keys}
    keys |= {f"performance/{name}" for name in performance(StepReport({}, timings, (), 10, 5), Hardware(1, 1.0, 1.0))}
    keys |= {f"timing/train/{stage}" for stage in (*timings, "total_step_time")}
    assert sorted(key for key in keys if f"`{key}`" not in PAGE) == []
