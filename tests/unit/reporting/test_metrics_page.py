"""docs/metrics.md explains every key that the console, the report and the throughput arithmetic know by name."""

from __future__ import annotations

from pathlib import Path

from posttrain.recipes.dpo import DpoRecipe
from posttrain.recipes.grpo import GrpoRecipe
from posttrain.recipes.rm import RewardModelRecipe
from posttrain.recipes.sft import SftRecipe
from posttrain.reporting.chart_specs import CHARTS
from posttrain.reporting.rows import Hardware, performance
from posttrain.types import StepReport

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_every_metric_shown_by_name_is_documented() -> None:
    timings = {"generation": 1.0, "policy_training": 1.0, "policy_and_reference_logprobs": 1.0}
    shown = [recipe.presentation for recipe in (GrpoRecipe, DpoRecipe, RewardModelRecipe, SftRecipe)]
    keys = {f"train/{metric.key}" for presentation in shown for metric in presentation.results}
    keys |= {key for chart in (*CHARTS, *(one.headline.chart for one in shown)) for key in chart.keys}
    keys |= {f"performance/{name}" for name in performance(StepReport({}, timings, (), 10, 5), Hardware(1, 1.0, 1.0))}
    keys |= {f"timing/train/{stage}" for stage in (*timings, "total_step_time")}
    assert sorted(key for key in keys if f"`{key}`" not in PAGE) == []
