"""The effective sample size of importance weights, from the means that micro-batches and updates add up to."""

from __future__ import annotations

import math

import pytest

from posttrain.algorithms.grpo import _mean_over_updates
from posttrain.types import UpdateReport


def of(*weights: list[float]) -> dict[str, float]:
    """A step whose updates have these weights."""
    updates = [
        {
            "sampling_importance_ratio": math.fsum(some) / len(some),
            "sampling_importance_square": math.fsum(w * w for w in some) / len(some),
        }
        for some in weights
    ]
    return _mean_over_updates([UpdateReport(update, 1) for update in updates])


def test_equal_weights_lose_nothing_and_one_large_one_nearly_everything() -> None:
    assert of([0.5] * 4)["sampling_effective_sample_size"] == pytest.approx(1.0)
    assert of([0.0, 0.0, 0.0, 1.0])["sampling_effective_sample_size"] == pytest.approx(0.25)
    assert of([1.0, 2.0], [3.0, 2.0])["sampling_effective_sample_size"] == pytest.approx(8**2 / (4 * 18))


def test_it_is_left_out_where_it_means_nothing() -> None:
    for metrics in (of([math.inf]), of([0.0]), _mean_over_updates([UpdateReport({"loss": 1.0}, 1)])):
        assert "sampling_effective_sample_size" not in metrics
        assert "sampling_importance_square" not in metrics
