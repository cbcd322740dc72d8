"""Everything that is drawn, as SVG text: the charts of pages, and pictures that are files of their own.

A chart of a page is a `<figure>`: a caption, a legend with the latest values, the drawing, and the numbers as JSON, from
which the page's script reads values under the pointer. It is complete without the script. Its colours come from the
page's style sheet (classes s0, s1, ...). A picture is an SVG document with colours of its own. Both follow the reader's
light or dark theme.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from posttrain.reporting import scales
from posttrain.reporting.pages import Html
from posttrain.reporting.presentation import Band
from posttrain.reporting.run_data import Series
from posttrain.reporting.scales import Axis, Bucket, label

WIDE, WIDE_AND_LOW, HALF = (1120, 280), (1120, 160), (550, 210)
MAX_POINTS = 400
MAX_BARS = 120
MIN_POINTS_TO_SMOOTH = 20
MAX_DOTS = 50
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 50, 14, 12, 24
PICTURE_STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.page { fill: #ffffff; stroke: #e3e6eb } .grid { stroke: #edf0f3 } .axis, .mark { stroke: #e3e6eb }
.tick { fill: #6a7280; font-size: 11.5px } .key { fill: #5b6472; font-size: 11.5px }
.title, .name { fill: #16191d; font-size: 16px; font-weight: 600 } .name { font-size: 13px }
.line { fill: none; stroke-width: 2.2; stroke-linecap: round } .a, .reach { stroke: #2563c9 }
.b { stroke: #d9730d; stroke-dasharray: 5 4 } .reach { stroke-width: 1.2; opacity: .6 }
.dot { fill: #ffffff; stroke-width: 2 } .good { fill: #1a7f4b } .bad { fill: #c2372e } .open { fill: #9aa3af }
.bar, .high { fill: #2563c9 } .mid { fill: #9aa3af } .low { fill: #d9730d }
@media (prefers-color-scheme: dark) {
.page { fill: #181c22; stroke: #2a3039 } .grid { stroke: #242a32 } .axis, .mark { stroke: #2a3039 }
.tick { fill: #8b94a3 } .key { fill: #a0a8b5 } .title, .name { fill: #e6e9ee } .a, .reach { stroke: #6ea3f7 }
.b { stroke: #f0a04b } .dot { fill: #181c22 } .bar, .high { fill: #6ea3f7 } .mid { fill: #6a7280 } .low { fill: #f0a04b } }
"""


@dataclass(frozen=True)
class Mark:
    """A step at which something was found."""

    step: int
    kind: str  # note, warning or error
    tip: str


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

    def grid(self, *, num_x: int = 6, num_y: int = 7, whole: bool = True) -> str:
        """Both axes with about that many ticks; `whole` ticks of the x axis are steps or iterations."""
        left, right, bottom = self.x.pixel_low, self.x.pixel_high, self.y.pixel_low
        parts = []
        ticks = scales.ticks(self.y.low, self.y.high, num_y)
        for value, text in zip(ticks, scales.labels(ticks), strict=True):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5}" text-anchor="end">{text}</text>')
        for value in scales.ticks(self.x.low, self.x.high, num_x, whole=whole):
            x, text = self.x(value), f"{value:.0f}" if whole else label(value)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        return "".join(parts)

    def pixels(self, places: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float] | None]:
        pairs = zip(places, values, strict=True)
        return [None if value is None else (self.x(place), self.y(value)) for place, value in pairs]

    def bar(self, left: float, right: float, value: float, *, kind: str, tip: str) -> str:
        """From the x axis to `value`, between two pixels."""
        top = self.y(value)
        size = f'width="{right - left:.2f}" height="{self.y.pixel_low - top:.2f}"'
        return f'<rect class="{kind}" x="{left:.2f}" y="{top}" {size} rx="1.5"><title>{escape(tip)}</title></rect>'

    def data(self) -> dict[str, object]:
        """The axes, for the script: [low, high, pixel of low, pixel of high]."""
        return {
            "x": [self.x.low, self.x.high, self.x.pixel_low, self.x.pixel_high],
            "y": [self.y.low, self.y.high, self.y.pixel_low, self.y.pixel_high],
        }


def path_of(points: Sequence[tuple[float, float] | None]) -> str:
    """The `d` of a path; None is a gap. A point between two gaps becomes a line of length zero, drawn as a dot."""
    commands, pen_down = [], False
    for point in points:
        if point is not None:
            commands.append(f"L{point[0]:g} {point[1]:g}" if pen_down else f"M{point[0]:g} {point[1]:g}h0")
        pen_down = point is not None
    return "".join(commands)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    wide: bool = False,
    chart_id: str,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
) -> Html:
    """Curves over steps. Series without a single finite value are left out; no series at all gives no chart."""
    drawn = [one for one in series if not one.is_empty]
    if not drawn:
        return Html()
    reduced = [scales.buckets(one.steps, one.values, MAX_POINTS) for one in drawn]
    finite = [value for one in drawn for value in one.values if value is not None]
    limits = scales.outlier_limits(finite)
    low, high = scales.value_range([value for value in finite if limits[0] <= value <= limits[1]])
    frame = Frame.around([step for one in drawn for step in one.steps], low, high, size=WIDE if wide else HALF)
    curves = [_threshold(frame, band) for band in bands]
    curves += [_curve(frame, points, index, chart_id, drawn[index].smooth) for index, points in enumerate(reduced)]
    curves += [_mark(frame, mark) for mark in marks if frame.x.low <= mark.step <= frame.x.high]
    num_outside = sum(not low <= value <= high for value in finite)
    if num_outside:
        extreme = max(finite, key=abs)
        note = f"{note} {num_outside} of {len(finite)} values lie outside the axis, the furthest {label(extreme)}."
    data = frame.data() | {
        "series": [
            {"steps": [point.step for point in points], "values": [_short(point.mean) for point in points]}
            for points in reduced
        ]
    }
    names = [(one.name, one.last) for one in drawn]
    return _figure(title, names, _svg(frame, title, "".join(curves), chart_id), data, note=note, wide=wide)


def _threshold(frame: Frame, band: Band) -> str:
    """The part of the drawing in which a value is probably wrong; nothing if the axis does not get there."""
    low = frame.y.low if band.above is None else max(band.above, frame.y.low)
    high = frame.y.high if band.below is None else min(band.below, frame.y.high)
    if low >= high:
        return ""
    top, left = frame.y(high), frame.x.pixel_low
    size = f'width="{frame.x.pixel_high - left}" height="{frame.y(low) - top:.2f}"'
    return f'<rect class="threshold {band.level}" x="{left}" y="{top}" {size}/>'


def _mark(frame: Frame, mark: Mark) -> str:
    """A dashed line over the whole height, with a triangle at its top."""
    x, top = frame.x(mark.step), frame.y.pixel_high
    tip = f"<title>{escape(f'step {mark.step}, {mark.tip}')}</title>"
    triangle = f"M{x - 5:g} {top - 6:g}h10l-5 8z"
    line = f'<line x1="{x}" x2="{x}" y1="{top}" y2="{frame.y.pixel_low}"/>'
    return f'<g class="found {escape(mark.kind)}">{tip}{line}<path d="{triangle}"/></g>'


def _curve(frame: Frame, points: Sequence[Bucket], index: int, chart_id: str, smooth: bool) -> str:
    """Raw values faint below, the smoothed curve above; short curves and scattered measurements are shown as points."""
    pixels = [None if p.mean is None else (frame.x(p.step), frame.y(p.mean)) for p in points]
    smooth = smooth and len(points) >= MIN_POINTS_TO_SMOOTH
    parts = [_band(frame, points, index)]
    parts.append(f'<path class="raw s{index}{" under" if smooth else ""}" d="{path_of(pixels)}"/>')
    if smooth:
        # A spike is clipped to the axis, or it would distort its neighbours.
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
) -> Html:
    """One bar per step, or per few steps, made of the layers; the first layer lies at the bottom."""
    if not steps or not layers:
        return Html()
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
    data = frame.data() | {
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
        f"</clipPath>{frame.grid(num_x=10 if frame.width > 800 else 6)}{drawing}"
        f'<line class="cursor" y1="{top}" y2="{frame.y.pixel_low}" x1="-9" x2="-9"/><g class="cursor-dots"></g></svg>'
    )


def _figure(
    title: str,
    names: Sequence[tuple[str, float | None]],
    svg: str,
    data: Mapping[str, object],
    *,
    note: str,
    wide: bool,
    unit: str = "",
) -> Html:
    legend = "".join(
        f'<span class="key"><i class="s{index}"></i>{escape(name)} '
        f"<b>{'–' if value is None else label(value) + unit}</b></span>"
        for index, (name, value) in enumerate(names)
    )
    # Metric names are data and must not end the script element.
    numbers = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    caption = f'<p class="note">{escape(note.strip())}</p>' if note.strip() else ""
    return Html(
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3>'
        f'<span class="at">latest</span></figcaption><div class="legend">{legend}</div>{svg}{caption}'
        f'<script type="application/json">{numbers}</script></figure>'
    )


def _short(value: float | None) -> float | None:
    """Six digits, to keep the page small."""
    return None if value is None else float(f"{value:.6g}")


def interval_mark(low: float, estimate: float, high: float, threshold: float) -> Html:
    """A line for the interval, a dot for the estimate, a dashed line for the threshold; small enough for a table."""
    width, height, middle = 240, 30, 11
    first, last = min(low, threshold), max(high, threshold)
    pad = 0.08 * (last - first) or 1.0
    x = Axis(first - pad, last + pad, 4, width - 4)
    wall = x(threshold)
    anchor = "start" if wall < 0.25 * width else "end" if wall > 0.75 * width else "middle"
    return Html(
        f'<svg class="interval" viewBox="0 0 {width} {height}" role="img">'
        f'<line class="wall" x1="{wall}" x2="{wall}" y1="2" y2="20"/>'
        f'<line class="reach" x1="{x(low)}" x2="{x(high)}" y1="{middle}" y2="{middle}"/>'
        f'<circle class="mean" cx="{x(estimate)}" cy="{middle}" r="3.5"/>'
        f'<text x="{wall}" y="{height - 1}" text-anchor="{anchor}">{label(threshold)}</text></svg>'
    )


# ------------------------------------------------------------------------------------------- pictures


def picture(title: str, size: tuple[int, int], body: str) -> Html:
    """An SVG document with its own style sheet, for example for a README."""
    width, height = size
    return Html(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><style>{PICTURE_STYLE}</style>"
        f'<rect class="page" x=".5" y=".5" rx="8" width="{width - 1}" height="{height - 1}"/>'
        f'<text class="title" x="20" y="28">{escape(title)}</text>{body}</svg>\n'
    )


def reward_histogram(
    title: str, caption: str, edges: Sequence[float], counts: Sequence[int], kinds: Sequence[str], *, unit: str
) -> Html:
    """A picture with one bar per count of rewards. `kinds` are their colours: low, mid or high."""
    width, height = 820, 380
    y = Axis(0, scales.value_range([0, *counts])[1], height - 48, 74)
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
