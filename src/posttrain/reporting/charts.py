"""Curves and stacked bars as SVG text, with the numbers that the page's script needs to read values out under the pointer.

Each chart is a `<figure>`: a caption, a legend that shows the latest values, the drawing, and the data as JSON. It is
complete without the script. Colours come from the page's style sheet (classes s0, s1, …), so light and dark need
nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from posttrain.reporting import scales
from posttrain.reporting.run_data import Series
from posttrain.reporting.scales import Axis, Bucket, label

WIDE, WIDE_AND_LOW, HALF = (1120, 280), (1120, 160), (550, 210)
MAX_POINTS = 400
MAX_BARS = 120
MIN_POINTS_TO_SMOOTH = 20
MAX_DOTS = 50
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 50, 14, 12, 24


@dataclass(frozen=True)
class Frame:
    """The size of a chart and its two axes."""

    width: int
    height: int
    x: Axis
    y: Axis

    @classmethod
    def around(cls, steps: Sequence[int], low: float, high: float, *, size: tuple[int, int], pad: float = 0.0) -> Frame:
        width, height = size
        first, last = min(steps), max(steps)
        if first == last:
            pad = max(pad, 0.5)
        x = Axis(first - pad, last + pad, MARGIN_LEFT, width - MARGIN_RIGHT)
        return cls(width, height, x, Axis(low, high, height - MARGIN_BOTTOM, MARGIN_TOP))

    def grid(self) -> str:
        left, right, bottom = self.x.pixel_low, self.x.pixel_high, self.y.pixel_low
        parts = []
        for value in scales.ticks(self.y.low, self.y.high, 7):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5}" text-anchor="end">{label(value)}</text>')
        for value in scales.ticks(self.x.low, self.x.high, 10 if self.width > 800 else 6, whole=True):
            x = self.x(value)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 17}" text-anchor="middle">{value:.0f}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        return "".join(parts)

    def data(self) -> dict[str, list[float]]:
        """The axes, for the script: [low, high, pixel of low, pixel of high]."""
        return {
            "x": [self.x.low, self.x.high, self.x.pixel_low, self.x.pixel_high],
            "y": [self.y.low, self.y.high, self.y.pixel_low, self.y.pixel_high],
        }


def path_of(points: Sequence[tuple[float, float] | None]) -> str:
    """The `d` of a path; None lifts the pen. A point between two gaps becomes a line of no length: a round dot."""
    commands, pen_down = [], False
    for point in points:
        if point is not None:
            commands.append(f"L{point[0]:g} {point[1]:g}" if pen_down else f"M{point[0]:g} {point[1]:g}h0")
        pen_down = point is not None
    return "".join(commands)


def line_chart(title: str, series: Sequence[Series], *, note: str = "", wide: bool = False, chart_id: str) -> str:
    """Curves over steps. Series without a single finite value are left out; no series at all gives no chart."""
    drawn = [one for one in series if not one.is_empty]
    if not drawn:
        return ""
    reduced = [scales.buckets(one.steps, one.values, MAX_POINTS) for one in drawn]
    finite = [value for one in drawn for value in one.values if value is not None]
    limits = scales.outlier_limits(finite)
    low, high = scales.value_range([value for value in finite if limits[0] <= value <= limits[1]])
    frame = Frame.around([step for one in drawn for step in one.steps], low, high, size=WIDE if wide else HALF)
    curves = [_curve(frame, points, index, chart_id, drawn[index].smooth) for index, points in enumerate(reduced)]
    num_outside = sum(not low <= value <= high for value in finite)
    if num_outside:
        extreme = max(finite, key=abs)
        note = f"{note} {num_outside} of {len(finite)} values lie outside the axis, the furthest {label(extreme)}."
    data: dict[str, Any] = frame.data() | {
        "series": [
            {"steps": [point.step for point in points], "values": [_short(point.mean) for point in points]}
            for points in reduced
        ]
    }
    names = [(one.name, one.last) for one in drawn]
    return _figure(title, names, _svg(frame, title, "".join(curves), chart_id), data, note=note, wide=wide)


def _curve(frame: Frame, points: Sequence[Bucket], index: int, chart_id: str, smooth: bool) -> str:
    """Raw values faint below, the smoothed curve above; short curves and scattered measurements are shown as points."""
    pixels = [None if p.mean is None else (frame.x(p.step), frame.y(p.mean)) for p in points]
    smooth = smooth and len(points) >= MIN_POINTS_TO_SMOOTH
    parts = [_band(frame, points, index)]
    parts.append(f'<path class="raw s{index}{" under" if smooth else ""}" d="{path_of(pixels)}"/>')
    if smooth:
        # A spike beyond the axis counts as far as the axis goes, or it would drag its neighbours along.
        low, high = frame.y.low, frame.y.high
        means = scales.smoothed([None if p.mean is None else min(max(p.mean, low), high) for p in points])
        line = [
            None if mean is None else (frame.x(p.step), frame.y(mean)) for p, mean in zip(points, means, strict=True)
        ]
        parts.append(f'<path class="smooth s{index}" d="{path_of(line)}"/>')
    elif len(points) <= MAX_DOTS:
        dots = [point for point in pixels if point is not None]
        parts += [f'<circle class="dot s{index}" cx="{x:g}" cy="{y:g}" r="2.6"/>' for x, y in dots]
    clip = f'clip-path="url(#{chart_id}-clip)"'
    return f"<g {clip}>{''.join(parts)}</g>"


def _band(frame: Frame, points: Sequence[Bucket], index: int) -> str:
    """Lowest to highest value of each bucket, one area per stretch without a gap; none where every bucket is one point."""
    if all(point.low == point.high for point in points):
        return ""
    stretches: list[list[tuple[float, float, float]]] = [[]]
    for point in points:
        if point.low is None or point.high is None:
            stretches.append([])
        else:
            stretches[-1].append((frame.x(point.step), frame.y(point.low), frame.y(point.high)))
    areas = []
    for stretch in stretches:
        outline = [(x, high) for x, _, high in stretch] + [(x, low) for x, low, _ in reversed(stretch)]
        areas.append(path_of(outline) + "Z" if outline else "")
    return f'<path class="band s{index}" d="{"".join(areas)}"/>'


def stacked_bars(
    title: str,
    steps: Sequence[int],
    layers: Mapping[str, Sequence[float]],
    *,
    note: str,
    chart_id: str,
    unit: str = "",
    low: bool = False,
) -> str:
    """One bar per step, or per few steps, made of the layers; the first layer lies at the bottom."""
    if not steps or not layers:
        return ""
    reduced = {name: scales.buckets(steps, values, MAX_BARS) for name, values in layers.items()}
    bar_steps = [bucket.step for bucket in next(iter(reduced.values()))]
    tops = [sum(points[i].mean or 0.0 for points in reduced.values()) for i in range(len(bar_steps))]
    bottom, top = scales.value_range([0.0, scales.outlier_limits(tops)[1]])
    gap = (bar_steps[-1] - bar_steps[0]) / max(len(bar_steps) - 1, 1) or 1.0
    frame = Frame.around(bar_steps, bottom, top, size=WIDE_AND_LOW if low else WIDE, pad=gap / 2)
    width = max(1.0, min(60.0, (frame.x(gap) - frame.x(0)) * 0.82))
    parts, base = [], [0.0] * len(bar_steps)
    for index, points in enumerate(reduced.values()):
        for i, bucket in enumerate(points):
            end = base[i] + (bucket.mean or 0.0)
            y, y_base = frame.y(end), frame.y(base[i])
            if y_base - y > 0.05:
                x = round(frame.x(bucket.step) - width / 2, 2)
                size = f'width="{width:.2f}" height="{y_base - y:.2f}"'
                parts.append(f'<rect class="bar s{index}" x="{x}" y="{y}" {size}/>')
            base[i] = end
    drawing = f'<g clip-path="url(#{chart_id}-clip)">{"".join(parts)}</g>'
    data: dict[str, Any] = frame.data() | {
        "stacked": True,
        "unit": unit,
        "series": [
            {"steps": bar_steps, "values": [_short(bucket.mean) for bucket in points]} for points in reduced.values()
        ],
    }
    names = [(name, points[-1].mean) for name, points in reduced.items()]
    return _figure(title, names, _svg(frame, title, drawing, chart_id), data, note=note, wide=True, unit=unit)


def _svg(frame: Frame, title: str, drawing: str, chart_id: str) -> str:
    left, top = frame.x.pixel_low, frame.y.pixel_high
    width, height = frame.x.pixel_high - left, frame.y.pixel_low - top
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(title)} over steps" tabindex="0">'
        f'<clipPath id="{chart_id}-clip"><rect x="{left - 4}" y="{top - 4}" width="{width + 8}" height="{height + 5}"/>'
        f"</clipPath>{frame.grid()}{drawing}"
        f'<line class="cursor" y1="{top}" y2="{frame.y.pixel_low}" x1="-9" x2="-9"/><g class="cursor-dots"></g></svg>'
    )


def _figure(
    title: str,
    names: Sequence[tuple[str, float | None]],
    svg: str,
    data: Mapping[str, Any],
    *,
    note: str,
    wide: bool,
    unit: str = "",
) -> str:
    legend = "".join(
        f'<span class="key"><i class="s{index}"></i>{escape(name)} '
        f"<b>{'–' if value is None else label(value) + unit}</b></span>"
        for index, (name, value) in enumerate(names)
    )
    # Nothing in a JSON script element may end it: metric names are data.
    numbers = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    caption = f'<p class="note">{escape(note.strip())}</p>' if note.strip() else ""
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3>'
        f'<span class="at">latest</span></figcaption><div class="legend">{legend}</div>{svg}{caption}'
        f'<script type="application/json">{numbers}</script></figure>'
    )


def _short(value: float | None) -> float | None:
    """Six digits are enough to read, and keep the page small."""
    return None if value is None else float(f"{value:.6g}")
