"""The KPI over iterations as one picture: training metric, held-out score, cost (or device hours) and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

from posttrain.apps.ship.pipeline.kpi import KpiRow
from posttrain.reporting import scales
from posttrain.reporting.charts import Frame, path_of, picture
from posttrain.reporting.scales import Axis, label

PANEL_WIDTH, PANEL_HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 44, 34
HEADER = 44
_DOTS = {"promote": "good", "reject": "bad"}


def kpi_svg(name: str, rows: Sequence[KpiRow]) -> Markup:
    """A self-contained SVG document; without iterations it holds a note."""
    body = _panels(rows) if rows else [f'<text class="key" x="20" y="{HEADER + 30}">no iteration yet</text>']
    size = (2 * PANEL_WIDTH, HEADER + 2 * PANEL_HEIGHT)
    return picture(f"{name}: KPI over iterations", size, "".join(body))


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


def _frame(rows: Sequence[KpiRow], values: Sequence[float], column: int, line: int, *, from_zero: bool) -> Frame:
    left, top = column * PANEL_WIDTH, HEADER + line * PANEL_HEIGHT
    low, high = scales.value_range([0.0, *values] if from_zero else values)
    x = Axis(rows[0].iteration - 0.6, rows[-1].iteration + 0.6, left + LEFT, left + PANEL_WIDTH - RIGHT)
    return Frame(PANEL_WIDTH, PANEL_HEIGHT, x, Axis(low, high, top + PANEL_HEIGHT - BOTTOM, top + TOP))


def _panel(frame: Frame, name: str, note: str, *drawn: str) -> str:
    left, top = frame.x.pixel_low - LEFT + 20, frame.y.pixel_high - TOP
    words = f'<text class="name" x="{left}" y="{top + 18}">{escape(name)}</text>'
    if note:
        words += f'<text class="key" x="{left}" y="{top + 34}">{escape(note)}</text>'
    return words + frame.grid(num_x=8, num_y=5) + "".join(drawn)


def _reward_panel(rows: Sequence[KpiRow], name: str) -> str:
    values, traces = [row.training_value for row in rows], [row.traces_reward for row in rows]
    frame = _frame(rows, _known(values, traces), 0, 0, from_zero=False)
    lines = _line(frame, rows, traces, "b"), _line(frame, rows, values, "a")
    return _panel(
        frame, name, "dashed: mean reward of the traces", *lines, *_dots(frame, rows, values, lambda row: "dot a")
    )


def _score_panel(rows: Sequence[KpiRow], name: str) -> str:
    values, others = [row.score for row in rows], [row.incumbent_score for row in rows]
    reach = [row.score_low for row in rows], [row.score_high for row in rows]
    frame = _frame(rows, _known(values, others, *reach), 1, 0, from_zero=False)
    return _panel(
        frame,
        name,
        "candidate with its interval; dashed: what it was compared with",
        _line(frame, rows, others, "b"),
        *(_reach(frame, row) for row in rows),
        _line(frame, rows, values, "a"),
        *_dots(frame, rows, values, lambda row: _DOTS.get(row.verdict or "", "open")),
    )


def _known(*series: Sequence[float | None]) -> list[float]:
    return [value for values in series for value in values if value is not None]


def _pixels(frame: Frame, rows: Sequence[KpiRow], values: Sequence[float | None]) -> list[tuple[float, float] | None]:
    return frame.pixels([row.iteration for row in rows], values)


def _line(frame: Frame, rows: Sequence[KpiRow], values: Sequence[float | None], colour: str) -> str:
    return f'<path class="line {colour}" d="{path_of(_pixels(frame, rows, values))}"/>'


def _dots(
    frame: Frame, rows: Sequence[KpiRow], values: Sequence[float | None], kind: Callable[[KpiRow], str]
) -> list[str]:
    return [
        f'<circle class="{kind(row)}" cx="{pixel[0]}" cy="{pixel[1]}" r="4"><title>iteration {row.iteration}: '
        f"{escape(row.reached)}</title></circle>"
        for row, pixel in zip(rows, _pixels(frame, rows, values), strict=True)
        if pixel is not None
    ]


def _reach(frame: Frame, row: KpiRow) -> str:
    if row.score_low is None or row.score_high is None:
        return ""
    x = frame.x(row.iteration)
    return f'<line class="reach" x1="{x}" x2="{x}" y1="{frame.y(row.score_low)}" y2="{frame.y(row.score_high)}"/>'


def _bar_panel(rows: Sequence[KpiRow], name: str, values: Sequence[float | None], *, column: int) -> str:
    frame = _frame(rows, _known(values), column, 1, from_zero=True)
    half = max(2.0, min(36.0, 0.6 * (frame.x(1) - frame.x(0)))) / 2
    bars = [
        frame.bar(frame.x(row.iteration) - half, frame.x(row.iteration) + half, value, kind="bar", tip=label(value))
        for row, value in zip(rows, values, strict=True)
        if value is not None
    ]
    return _panel(frame, name, "", *bars)
