"""docs/metrics.md explains every key that the console, the report and the throughput arithmetic know by name."""

from __future__ import annotations

from pathlib import Path

from posttrain.reporting.metric_rows import Hardware, performance
from posttrain.reporting.report import CHARTS, HEADLINE_CHARTS
from posttrain.reporting.wording import RESULTS
from posttrain.types import StepReport

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_every_metric_shown_by_name_is_explained() -> None:
    timings = {"generation": 1.0, "policy_training": 1.0, "policy_and_reference_logprobs": 1.0}
    keys = {f"train/{metric}" for shown in RESULTS.values() for metric, _, _ in shown}
    keys |= {key for _, curves, _ in (*CHARTS, *HEADLINE_CHARTS.values()) for key, _ in curves}
    keys |= {f"performance/{name}" for name in performance(StepReport({}, timings, (), 10, 5), Hardware(1, 1.0, 1.0))}
    keys |= {f"timing/train/{stage}" for stage in (*timings, "total_step_time")}
    assert sorted(key for key in keys if f"`{key}`" not in PAGE) == []
