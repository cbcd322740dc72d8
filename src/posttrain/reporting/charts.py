"""Pictures that are files of their own: SVG documents with their own colours, in the reader's light or dark theme.

The arithmetic (axis ranges, round ticks, labels) is here, too. Charts of pages are drawn by `assets/chart.js`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markupsafe import Markup

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 50, 14, 12, 24
PICTURE_STYLE = Path(__file__).with_name("assets").joinpath("picture.css").read_text("utf-8")


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


@dataclass(frozen=True)
class Frame:
    """The size of a chart and its two axes."""

    width: int
    height: int
    x: Axis
    y: Axis

    @classmethod
    def around(cls, steps: Sequence[int], low: float, high: float, *, size: tuple[int, int]) -> Frame:
        width, height = size
        first, last = min(steps), max(steps)
        pad = 0.5 if first == last else 0.0
        x = Axis(first - pad, last + pad, MARGIN_LEFT, width - MARGIN_RIGHT)
        return cls(width, height, x, Axis(low, high, height - MARGIN_BOTTOM, MARGIN_TOP))

    def grid(self, *, num_x: int = 6, num_y: int = 7, whole: bool = True) -> str:
        """Both axes with about that many ticks; `whole` ticks of the x axis are steps or iterations."""
        left, right, bottom = self.x.pixel_low, self.x.pixel_high, self.y.pixel_low
        parts = []
        places = ticks(self.y.low, self.y.high, num_y)
        for value, text in zip(places, labels(places), strict=True):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5}" text-anchor="end">{text}</text>')
        for value in ticks(self.x.low, self.x.high, num_x, whole=whole):
            x, text = self.x(value), f"{value:.0f}" if whole else label(value)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        return "".join(parts)

    def curve(self, style: str, places: Sequence[float], values: Sequence[float | None]) -> str:
        return f'<path class="line {style}" d="{path_of(self.pixels(places, values))}"/>'

    def pixels(self, places: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float] | None]:
        pairs = zip(places, values, strict=True)
        return [None if value is None else (self.x(place), self.y(value)) for place, value in pairs]

    def bar(self, left: float, right: float, value: float, *, kind: str, tip: str) -> str:
        """From the x axis to `value`, between two pixels."""
        top = self.y(value)
        size = f'width="{right - left:.2f}" height="{self.y.pixel_low - top:.2f}"'
        return f'<rect class="{kind}" x="{left:.2f}" y="{top}" {size} rx="1.5"><title>{escape(tip)}</title></rect>'


def path_of(points: Sequence[tuple[float, float] | None]) -> str:
    """The `d` of a path; None is a gap. A point between two gaps becomes a line of length zero, drawn as a dot."""
    commands, pen_down = [], False
    for point in points:
        if point is not None:
            commands.append(f"L{point[0]:g} {point[1]:g}" if pen_down else f"M{point[0]:g} {point[1]:g}h0")
        pen_down = point is not None
    return "".join(commands)


def picture(title: str, size: tuple[int, int], body: str) -> Markup:
    """An SVG document with its own style sheet, for example for a README."""
    width, height = size
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><style>\n{PICTURE_STYLE}</style>"
        f'<rect class="page" x=".5" y=".5" rx="8" width="{width - 1}" height="{height - 1}"/>'
        f'<text class="title" x="20" y="28">{escape(title)}</text>{body}</svg>\n'
    )


def reward_histogram(
    title: str, caption: str, edges: Sequence[float], counts: Sequence[int], kinds: Sequence[str], *, unit: str
) -> Markup:
    """A picture with one bar per count of rewards. `kinds` are their colours: low, mid or high."""
    width, height = 820, 380
    y = Axis(0, value_range([0, *counts])[1], height - 48, 74)
    frame = Frame(width, height, Axis(edges[0], edges[-1], 64, width - 24), y)
    bars = []
    for left, right, count, kind in zip(edges, edges[1:], counts, kinds, strict=False):
        tip = f"{left:g} to {right:g}: {count:,} {unit}"
        bars.append(frame.bar(frame.x(left) + 1, frame.x(right) - 1, count, kind=kind, tip=tip))
    name_x = (frame.x.pixel_low + frame.x.pixel_high) / 2
    name = f'<text class="tick" x="{name_x}" y="{height - 10}" text-anchor="middle">reward</text>'
    key = f'<text class="key" x="20" y="50">{escape(caption)}</text>'
    body = f"{key}{frame.grid(num_x=10, num_y=6, whole=False)}{''.join(bars)}{name}"
    return picture(title, (width, height), body)
