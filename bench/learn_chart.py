"""The picture of `learn.py report`: accuracy over minutes with 95 % intervals, posttrain solid and TRL dashed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from posttrain.reporting import charts
from posttrain.reporting.charts import Axis, Frame, path_of, picture

SIZE = (820, 380)
STYLES = {"posttrain": "a", "trl": "b"}


def accuracy_over_time(runs: Mapping[str, Mapping[str, Any]], start: Mapping[str, Any]) -> str:
    width, height = SIZE
    curves = {
        name: [{"seconds": 0.0, **start}, *(point for point in run["curve"] if "accuracy" in point)]
        for name, run in runs.items()
    }
    points = [point for curve in curves.values() for point in curve]
    bounds = [100 * bound for point in points for bound in point["interval"]]
    longest = max(point["seconds"] for point in points) / 60
    low, high = charts.value_range([0.0, *bounds])
    frame = Frame(width, height, Axis(0, longest * 1.02, 64, width - 150), Axis(low, high, height - 48, 60))
    body = [frame.grid(num_x=9, num_y=6, whole=False)]
    for name, curve in curves.items():
        style = STYLES[runs[name]["side"]]
        minutes = [point["seconds"] / 60 for point in curve]
        body.append(f'<path class="line {style}" d="{path_of(frame.pixels(minutes, [_percent(p) for p in curve]))}"/>')
        for minute, point in zip(minutes, curve, strict=True):
            x, (bottom, top) = frame.x(minute), (frame.y(100 * bound) for bound in point["interval"])
            body.append(
                f'<line class="line {style}" style="stroke-width:1" x1="{x}" x2="{x}" y1="{bottom}" y2="{top}"/>'
            )
            body.append(f'<circle class="dot {style}" cx="{x}" cy="{frame.y(_percent(point))}" r="3.5"/>')
        at_end = f'x="{frame.x(minutes[-1]) + 10}" y="{frame.y(_percent(curve[-1])) + 4}"'
        body.append(f'<text class="key" {at_end}>{escape(name)}</text>')
    middle = (frame.x.pixel_low + frame.x.pixel_high) / 2
    body.append(f'<text class="tick" x="{middle}" y="{height - 10}" text-anchor="middle">minutes of GRPO</text>')
    body.append('<text class="key" x="20" y="50">avg@16 on held-out problems, %, with 95 % intervals</text>')
    return str(picture("Accuracy over time", SIZE, "".join(body)))


def _percent(point: Mapping[str, Any]) -> float:
    return 100 * float(point["accuracy"])
