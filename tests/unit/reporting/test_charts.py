"""The arithmetic of pictures, and the points of curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.reporting import charts
from posttrain.reporting.chart_specs import points_of

numbers = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_axis_covers_its_values_with_a_few_round_ticks(values: list[float]) -> None:
    low, high = charts.value_range(values)
    assert low < high
    slack = 1e-6 * (high - low)
    assert low - slack <= min(values)
    assert max(values) <= high + slack
    ticks = charts.ticks(low, high, 7)
    assert 3 <= len(ticks) <= 9
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 60, 6, [0, 10, 20, 30, 40, 50, 60]), (-3, 4, 5, [-2, 0, 2, 4])],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]) -> None:
    assert charts.ticks(low, high, count) == pytest.approx(expected)


def test_step_ticks_are_whole_numbers() -> None:
    assert charts.ticks(0.5, 2.5, 10, whole=True) == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1500.0, "1500"), (12_345.0, "12.35k"), (2e6, "2e6"), (5e-7, "5e-7"), (-3.0, "-3")],
)
def test_labels_are_short(value: float, text: str) -> None:
    assert charts.label(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [([1.0, 1.0000001, 1.0000002], ["1", "1+1e-7", "1+2e-7"]), ([0.0, 0.5, 1.0], ["0", "0.5", "1"])],
)
def test_labels_of_ticks_differ(values: list[float], texts: list[str]) -> None:
    assert charts.labels(values) == texts


@given(st.lists(st.none() | numbers, max_size=60), st.integers(1, 20))
def test_points_of_a_curve_cover_every_value_once(values: list[float | None], max_points: int) -> None:
    steps = np.arange(1, len(values) + 1)
    found = points_of(steps, np.array(values, dtype=float), max_points)
    assert len(found["steps"]) == len(found["mean"]) == min(max_points, len(values))
    bounds = found if "low" in found else found | {"low": found["mean"], "high": found["mean"]}
    start = 0
    for place, step in enumerate(found["steps"]):
        part = [value for value in values[start : int(step or 0)] if value is not None]
        start = int(step or 0)
        mean, low, high = (bounds[name][place] for name in ("mean", "low", "high"))
        if part:
            assert (low, high) == pytest.approx((min(part), max(part)), rel=1e-5)
            assert mean == pytest.approx(sum(part) / len(part), rel=1e-4, abs=1e-4 * max(map(abs, part)))
        else:
            assert mean is None
    assert start == len(values)
