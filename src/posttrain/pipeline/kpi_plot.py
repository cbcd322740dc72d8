"""The KPI over iterations as one picture: training metric, held-out score, cost (or device hours) and time. SVG, no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from posttrain.pipeline.kpi import KpiRow
from posttrain.reporting import scales
from posttrain.reporting.charts import path_of
from posttrain.reporting.scales import Axis, label

PANEL_WIDTH, PANEL_HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 44, 34
HEADER = 44
# Its own colours: the file is shown outside of our pages, and follows the reader's theme.
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.page { fill: #ffffff; stroke: #e3e6eb } .grid { stroke: #edf0f3 } .tick { fill: #6a7280; font-size: 11px }
.title { fill: #16191d; font-size: 16px; font-weight: 600 } .name { fill: #16191d; font-size: 13px; font-weight: 600 }
.key { fill: #5b6472; font-size: 11.5px } .line { fill: none; stroke-width: 2.2; stroke-linecap: round }
.a { stroke: #2563c9 } .b { stroke: #d9730d; stroke-dasharray: 5 4 } .reach { stroke: #2563c9; stroke-width: 1.2; opacity: .6 }
.dot { fill: #ffffff; stroke-width: 2 } .good { fill: #1a7f4b } .bad { fill: #c2372e } .open { fill: #9aa3af }
.bar { fill: #2563c9 }
@media (prefers-color-scheme: dark) {
.page { fill: #181c22; stroke: #2a3039 } .grid { stroke: #242a32 } .tick { fill: #8b94a3 } .title, .name { fill: #e6e9ee }
.key { fill: #a0a8b5 } .a, .reach { stroke: #6ea3f7 } .b { stroke: #f0a04b } .dot { fill: #181c22 } .bar { fill: #6ea3f7 } }
"""
_DOTS = {"promote": "good", "reject": "bad"}


@dataclass(frozen=True)
class _Frame:
    x: Axis
    y: Axis
    left: float
    top: float


def kpi_svg(name: str, rows: Sequence[KpiRow]) -> str:
    """A self-contained SVG document; without iterations it holds a note."""
    width, height = 2 * PANEL_WIDTH, HEADER + 2 * PANEL_HEIGHT
    body = _panels(rows) if rows else [f'<text class="key" x="20" y="{HEADER + 30}">no iteration yet</text>']
    title = f"{name}: KPI over iterations"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="page" x=".5" y=".5" rx="8" width="{width - 1}" height="{height - 1}"/>'
        f'<text class="title" x="20" y="28">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def _panels(rows: Sequence[KpiRow]) -> list[str]:
    metric = next((row.training_metric for row in rows if row.training_metric), "reward")
    score = next((row.score_metric for row in rows if row.score_metric), "score")
    with_price = any(row.cost is not None for row in rows)
    costs = [row.cost if with_price else row.device_hours for row in rows]
    long = max(row.seconds for row in rows) >= 7200
    times = [row.seconds / (3600 if long else 60) for row in rows]
    return [
        _reward_panel(rows, f"training {metric}"),
        _score_panel(rows, f"held-out {score}"),
        _bar_panel(rows, "cost" if with_price else "device hours", costs, column=0),
        _bar_panel(rows, f"time in {'hours' if long else 'minutes'}", times, column=1),
    ]


def _frame(rows: Sequence[KpiRow], values: Sequence[float], column: int, line: int, *, from_zero: bool) -> _Frame:
    left, top = column * PANEL_WIDTH, HEADER + line * PANEL_HEIGHT
    low, high = scales.value_range([0.0, *values] if from_zero else values)
    x = Axis(rows[0].iteration - 0.6, rows[-1].iteration + 0.6, left + LEFT, left + PANEL_WIDTH - RIGHT)
    return _Frame(x, Axis(low, high, top + PANEL_HEIGHT - BOTTOM, top + TOP), left, top)


def _axes(frame: _Frame, name: str, note: str = "") -> str:
    x, y = frame.x, frame.y
    parts = [f'<text class="name" x="{frame.left + 20}" y="{frame.top + 18}">{escape(name)}</text>']
    if note:
        parts.append(f'<text class="key" x="{frame.left + 20}" y="{frame.top + 34}">{escape(note)}</text>')
    for value in scales.ticks(y.low, y.high, 5):
        parts.append(f'<line class="grid" x1="{x.pixel_low}" x2="{x.pixel_high}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(
            f'<text class="tick" x="{x.pixel_low - 8}" y="{y(value) + 4}" text-anchor="end">{label(value)}</text>'
        )
    for value in scales.ticks(x.low, x.high, 8, whole=True):
        parts.append(
            f'<text class="tick" x="{x(value)}" y="{y.pixel_low + 18}" text-anchor="middle">{value:.0f}</text>'
        )
    return "".join(parts)


def _reward_panel(rows: Sequence[KpiRow], name: str) -> str:
    values, traces = [row.training_value for row in rows], [row.traces_reward for row in rows]
    frame = _frame(rows, _known(values, traces), 0, 0, from_zero=False)
    parts = [_axes(frame, name, "dashed: mean reward of the traces"), _line(frame, rows, traces, "b")]
    parts += [_line(frame, rows, values, "a"), *_dots(frame, rows, values, lambda row: "dot a")]
    return "".join(parts)


def _score_panel(rows: Sequence[KpiRow], name: str) -> str:
    values, others = [row.score for row in rows], [row.incumbent_score for row in rows]
    reach = [row.score_low for row in rows], [row.score_high for row in rows]
    frame = _frame(rows, _known(values, others, *reach), 1, 0, from_zero=False)
    parts = [_axes(frame, name, "candidate with its interval; dashed: what it was compared with")]
    parts += [_line(frame, rows, others, "b"), *(_reach(frame, row) for row in rows), _line(frame, rows, values, "a")]
    parts += _dots(frame, rows, values, lambda row: _DOTS.get(row.verdict or "", "open"))
    return "".join(parts)


def _known(*series: Sequence[float | None]) -> list[float]:
    return [value for values in series for value in values if value is not None]


def _line(frame: _Frame, rows: Sequence[KpiRow], values: Sequence[float | None], colour: str) -> str:
    return f'<path class="line {colour}" d="{path_of(_pixels(frame, rows, values))}"/>'


def _dots(
    frame: _Frame, rows: Sequence[KpiRow], values: Sequence[float | None], style: Callable[[KpiRow], str]
) -> list[str]:
    pairs = zip(rows, _pixels(frame, rows, values), strict=True)
    return [
        f'<circle class="{style(row)}" cx="{pixel[0]}" cy="{pixel[1]}" r="4"><title>iteration {row.iteration}: '
        f"{row.reached}</title></circle>"
        for row, pixel in pairs
        if pixel is not None
    ]


def _reach(frame: _Frame, row: KpiRow) -> str:
    if row.score_low is None or row.score_high is None:
        return ""
    x = frame.x(row.iteration)
    return f'<line class="reach" x1="{x}" x2="{x}" y1="{frame.y(row.score_low)}" y2="{frame.y(row.score_high)}"/>'


def _bar_panel(rows: Sequence[KpiRow], name: str, values: Sequence[float | None], *, column: int) -> str:
    frame = _frame(rows, [value for value in values if value is not None], column, 1, from_zero=True)
    width = max(2.0, min(36.0, 0.6 * (frame.x(1) - frame.x(0))))
    parts = [_axes(frame, name)]
    for row, value in zip(rows, values, strict=True):
        if value is not None:
            top, left = frame.y(value), round(frame.x(row.iteration) - width / 2, 2)
            size = f'width="{width:.2f}" height="{frame.y.pixel_low - top:.2f}"'
            parts.append(f'<rect class="bar" x="{left}" y="{top}" {size} rx="1.5"><title>{label(value)}</title></rect>')
    return "".join(parts)


def _pixels(frame: _Frame, rows: Sequence[KpiRow], values: Sequence[float | None]) -> list[tuple[float, float] | None]:
    pairs = zip(rows, values, strict=True)
    return [None if value is None else (frame.x(row.iteration), frame.y(value)) for row, value in pairs]
