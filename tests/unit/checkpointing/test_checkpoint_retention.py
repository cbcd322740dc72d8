"""Which checkpoints stay, case by case and against a slow reference, and which get a copy of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.checkpointing.save_and_resume import CopyRule
from posttrain.checkpointing.store import surplus_steps

# name: (metrics by step, settings, the steps that stay)
CASES: dict[str, tuple[dict[int, float | None], dict[str, object], set[int]]] = {
    "nothing there": ({}, {}, set()),
    "fewer than k": ({10: 0.1, 20: 0.2}, {}, {10, 20}),
    "the best stay": ({10: 0.9, 20: 0.1, 30: 0.8, 40: 0.7}, {}, {10, 30, 40}),
    "the latest stays though it is worst": ({10: 0.9, 20: 0.8, 30: 0.7, 40: 0.1}, {}, {10, 20, 30, 40}),
    "lower is better": ({10: 0.9, 20: 0.1, 30: 0.8, 40: 0.7}, {"higher_is_better": False}, {20, 30, 40}),
    "a tie goes to the newer": ({10: 0.5, 20: 0.5, 30: 0.5, 40: 0.5}, {}, {20, 30, 40}),
    "a tie goes to the newer, lower is better": (
        {10: 0.5, 20: 0.5, 30: 0.5, 40: 0.5},
        {"higher_is_better": False},
        {20, 30, 40},
    ),
    "without the metric is worst": ({10: None, 20: -5.0, 30: -6.0, 40: -7.0}, {}, {20, 30, 40}),
    "without the metric is worst, lower is better": (
        {10: None, 20: 5.0, 30: 6.0, 40: 7.0},
        {"higher_is_better": False},
        {20, 30, 40},
    ),
    "not a number is worst": ({10: math.nan, 20: 0.0, 30: 0.0, 40: 0.0}, {}, {20, 30, 40}),
    "no metric: the newest": ({10: 0.9, 20: 0.8, 30: 0.1, 40: 0.0}, {"use_metric": False}, {20, 30, 40}),
    "between periods: not a candidate": ({5: 0.9, 10: 0.1, 20: 0.2, 30: 0.3}, {}, {10, 20, 30}),
    "between periods: kept while latest": ({10: 0.1, 20: 0.2, 30: 0.3, 33: 0.0}, {}, {10, 20, 30, 33}),
    "null keeps all": ({5: 0.0, 10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}, {"keep_top_k": None}, {5, 10, 20, 30, 40}),
    "zero keeps the latest": ({10: 0.9, 20: 0.1}, {"keep_top_k": 0}, {20}),
    "one": ({10: 0.9, 20: 0.1, 30: 0.2}, {"keep_top_k": 1}, {10, 30}),
    "named ones stay": ({10: 0.1, 20: 0.9, 30: 0.8}, {"keep_top_k": 1, "always_keep": (10,)}, {10, 20, 30}),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    metrics, settings, kept = CASES[name]
    defaults: dict[str, object] = {"keep_top_k": 3, "save_period": 10, "use_metric": True, "higher_is_better": True}
    surplus = surplus_steps(metrics, **{**defaults, **settings})  # type: ignore[arg-type]
    assert set(metrics) - set(surplus) == kept
    assert surplus == sorted(surplus)


def slow_reference(
    metrics: Mapping[int, float | None], keep_top_k: int, save_period: int, use_metric: bool, higher_is_better: bool
) -> set[int]:
    """Count, for each candidate, the candidates that are better than it."""

    def better(a: int, b: int) -> bool:
        x, y = (metrics[a], metrics[b]) if use_metric else (None, None)
        if x is not None and y is not None and x != y:
            return x > y if higher_is_better else x < y
        if (x is None) != (y is None):
            return y is None
        return a > b

    candidates = [step for step in metrics if step % save_period == 0]
    kept = {step for step in candidates if sum(better(other, step) for other in candidates) < keep_top_k}
    return kept | {max(metrics)}


@given(
    metrics=st.dictionaries(
        st.integers(0, 60), st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.25, 0.5])), min_size=1, max_size=15
    ),
    keep_top_k=st.integers(0, 6),
    save_period=st.integers(1, 7),
    use_metric=st.booleans(),
    higher_is_better=st.booleans(),
)
def test_equals_the_slow_reference(
    metrics: dict[int, float | None], keep_top_k: int, save_period: int, use_metric: bool, higher_is_better: bool
) -> None:
    surplus = surplus_steps(
        metrics,
        keep_top_k=keep_top_k,
        save_period=save_period,
        use_metric=use_metric,
        higher_is_better=higher_is_better,
    )
    kept = slow_reference(metrics, keep_top_k, save_period, use_metric, higher_is_better)
    assert set(surplus) == set(metrics) - kept


# -- copies ------------------------------------------------------------------------------------------------------------

GIB = 2**30
# Written at 1 GiB/s: the copy of a model of 2 GiB is estimated at 2 s + 6 passes of 2 s.
WRITTEN = {"save_s": 8.0, "saved_bytes": 8 * GIB}
ESTIMATED_S = 14.0


def is_made(rule: CopyRule, trained_s: float, *, blocks: bool) -> bool:
    return rule.reason_against(trained_s=trained_s, blocks=blocks, **WRITTEN) is None  # type: ignore[arg-type]


def test_a_copy_may_take_2_percent_of_the_time_where_training_waits_and_half_of_it_where_not() -> None:
    rule = CopyRule(by_cost=True, model_bytes=2 * GIB)
    assert rule.cost_s(8.0, 8 * GIB) == ESTIMATED_S
    assert [is_made(rule, ESTIMATED_S * 50 * share, blocks=True) for share in (0.99, 1.01)] == [False, True]
    assert [is_made(rule, ESTIMATED_S * 2 * share, blocks=False) for share in (0.99, 1.01)] == [False, True]


def test_the_measured_time_of_a_copy_replaces_the_estimate() -> None:
    rule = CopyRule(by_cost=True, model_bytes=2 * GIB, measured_s=1.0)
    assert is_made(rule, 51.0, blocks=True)
    rule.measured_s = 100.0
    reason = rule.reason_against(trained_s=1000.0, blocks=True, save_s=8.0, saved_bytes=8 * GIB)
    assert reason is not None
    assert reason.startswith("it would take 100 s after 1000 s of training, more than 2 %")


def test_a_copy_that_is_asked_for_is_made_at_any_cost() -> None:
    assert is_made(CopyRule(by_cost=False, model_bytes=2 * GIB, measured_s=1e6), 1.0, blocks=True)
