"""The maths behind the pictures, and the pictures that stand alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.reporting import scales

numbers = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_axis_covers_its_values_with_a_few_round_ticks(values: list[float]) -> None:
    low, high = scales.value_range(values)
    assert low < high
    slack = 1e-6 * (high - low)
    assert low - slack <= min(values)
    assert max(values) <= high + slack
    ticks = scales.ticks(low, high, 7)
    assert 3 <= len(ticks) <= 9
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 60, 6, [0, 10, 20, 30, 40, 50, 60]), (-3, 4, 5, [-2, 0, 2, 4])],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]) -> None:
    assert scales.ticks(low, high, count) == pytest.approx(expected)


def test_step_ticks_are_whole_numbers() -> None:
    assert scales.ticks(0.5, 2.5, 10, whole=True) == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1500.0, "1500"), (12_345.0, "12.35k"), (2e6, "2e6"), (5e-7, "5e-7"), (-3.0, "-3")],
)
def test_labels_are_short(value: float, text: str) -> None:
    assert scales.label(value) == text


def slow_local_line(values: list[float | None], width: float) -> list[float | None]:
    """The weighted least-squares line through all points, solved anew for each point."""
    result: list[float | None] = []
    for centre, value in enumerate(values):
        if value is None:
            result.append(None)
            continue
        points = [
            (j - centre, v, math.exp(-0.5 * ((j - centre) / width) ** 2)) for j, v in enumerate(values) if v is not None
        ]
        w, wx = sum(a for _, _, a in points), sum(a * x for x, _, a in points)
        wxx, wy = sum(a * x * x for x, _, a in points), sum(a * y for _, y, a in points)
        wxy = sum(a * x * y for x, y, a in points)
        result.append((wxx * wy - wx * wxy) / (w * wxx - wx * wx))
    return result


def test_smoothing_equals_a_slow_weighted_line_fit() -> None:
    values: list[float | None] = [math.sin(i / 3) + (i % 4) * 0.3 for i in range(40)]
    values[7] = values[8] = None
    smooth, slow = scales.smoothed(values), slow_local_line(values, width=3.0)
    assert [value is None for value in smooth] == [value is None for value in values]
    assert [v for v in smooth if v is not None] == pytest.approx([v for v in slow if v is not None])


def test_smoothing_keeps_a_straight_line() -> None:
    line: list[float | None] = [0.5 * i - 3 for i in range(50)]
    assert scales.smoothed(line) == pytest.approx(line)


def test_smoothing_of_a_single_value_is_that_value() -> None:
    assert scales.smoothed([None, 2.0, None]) == [None, 2.0, None]


@given(st.lists(st.none() | numbers, max_size=60), st.integers(1, 20))
def test_buckets_cover_every_value_once(values: list[float | None], max_points: int) -> None:
    steps = list(range(1, len(values) + 1))
    found = scales.buckets(steps, values, max_points)
    assert len(found) == min(max_points, len(values))
    assert [bucket.step for bucket in found] == sorted({bucket.step for bucket in found})
    start = 0
    for bucket in found:
        part = [value for value in values[start : bucket.step] if value is not None]
        start = bucket.step
        if part:
            assert (bucket.low, bucket.high) == (min(part), max(part))
            assert bucket.mean == pytest.approx(sum(part) / len(part), abs=1e-3)
        else:
            assert bucket.mean is None
    assert start == len(values)
