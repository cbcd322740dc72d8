"""The arithmetic of pictures: axis ranges, round ticks, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
    """Labels of ticks: as short as they can be and still differ. Ticks around 1.0000001 show what is above 1."""
    short = [label(value) for value in values]
    if len(set(short)) == len(short):
        return short
    base = label(values[0])
    offset = float(base) if base[-1].isdigit() else values[0]
    return [
        base if value == offset else f"{base}{'+' if value > offset else '−'}{label(abs(value - offset))}"
        for value in values
    ]
