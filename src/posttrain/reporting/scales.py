"""The arithmetic of charts: axis ranges, round ticks, labels, smoothing, down-sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Axis:
    """A linear map from values to pixels; `pixel_low` is where `low` is drawn."""

    low: float
    high: float
    pixel_low: float
    pixel_high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.pixel_low + share * (self.pixel_high - self.pixel_low), 2)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring points drawn as one. A bucket without a finite value is a gap in the curve."""

    step: int  # the last of its steps
    mean: float | None
    low: float | None
    high: float | None


def tick_size(span: float, count: int) -> float:
    """The 1, 2 or 5 times a power of ten that cuts `span` into at most `count` pieces."""
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round numbers within [low, high]."""
    size = tick_size(high - low, count)
    if whole:
        size = max(1.0, round(size))
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [index * size for index in range(first, last + 1)]


def value_range(values: Sequence[float], *, count: int = 5) -> tuple[float, float]:
    """The range of a value axis: round at both ends, and from zero if zero is close to the data."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low >= 0 and low <= 0.6 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant is shown against zero
        low, high = (min(low, 0.0), max(high, 0.0)) if high else (0.0, 1.0)
    size = tick_size(high - low, count)
    return math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size


def outlier_limits(values: Sequence[float]) -> tuple[float, float]:
    """The range to draw, without extreme spikes, which would flatten the rest of the curve.

    Without such spikes it is the minimum and maximum. Values outside are clipped and reported.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if len(ordered) < 20:
        return low, high
    near_low, near_high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    spread = max(near_high - near_low, 1e-12 * max(abs(near_low), abs(near_high)), 1e-300)
    return (
        near_low - spread if low < near_low - 8 * spread else low,
        near_high + spread if high > near_high + 8 * spread else high,
    )


def label(value: float) -> str:
    """A short number for an axis or a read-out: 0.25, 12, 1.2k, 3e-06."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"


def labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks: as short as they can be and still differ. Ticks around 1.0000001 are shown as what is above 1."""
    short = [label(value) for value in values]
    if len(set(short)) == len(short):
        return short
    base = label(values[0])
    offset = float(base) if base[-1].isdigit() else values[0]
    return [
        base if value == offset else f"{base}{'+' if value > offset else '−'}{label(abs(value - offset))}"
        for value in values
    ]


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Local linear regression with Gaussian weights. Gaps stay gaps.

    The window is symmetric, so unlike a running average it does not lag behind a trend or bend at the ends.
    """
    present = np.array([index for index, value in enumerate(values) if value is not None], dtype=float)
    y = np.array([value for value in values if value is not None], dtype=float)
    width = max(3.0, 0.045 * len(values))  # standard deviation of the weights, in points
    x = present[None, :] - present[:, None]  # [i, j]: where j lies as seen from i
    weights = np.exp(-0.5 * (x / width) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    mean_x, mean_y = (weights * x).sum(axis=1), weights @ y
    spread = (weights * x**2).sum(axis=1) - mean_x**2
    slope = ((weights * x) @ y - mean_x * mean_y) / np.where(spread > 1e-9, spread, np.inf)
    fitted = iter((mean_y - slope * mean_x).tolist())
    return [None if value is None else next(fitted) for value in values]


def buckets(steps: Sequence[int], values: Sequence[float | None], max_points: int) -> list[Bucket]:
    """At most `max_points` buckets of nearly equal size; with fewer points than that, one bucket per point."""
    count = min(len(steps), max_points)
    result = []
    for index in range(count):
        start, end = len(steps) * index // count, len(steps) * (index + 1) // count
        part = [value for value in values[start:end] if value is not None]
        if part:
            result.append(Bucket(steps[end - 1], math.fsum(value / len(part) for value in part), min(part), max(part)))
        else:
            result.append(Bucket(steps[end - 1], None, None, None))
    return result
