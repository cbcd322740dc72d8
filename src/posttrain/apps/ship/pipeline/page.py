"""The pipeline as one HTML page: the KPI over iterations, as a table and as a picture (training metric, held-out score,
cost or device hours, time), and every stage with a link to its report.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from posttrain import __version__
from posttrain.apps.ship.pipeline.kpi import KpiRow, kpi_rows, write_kpi
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations, relative
from posttrain.config.pipeline import PipelineConfig
from posttrain.files import durable
from posttrain.reporting.charts import Axis, Frame, label, path_of, picture, value_range
from posttrain.reporting.pages import render_page, when
from posttrain.reporting.wording import duration

PAGE, PICTURE = "index.html", "kpi.svg"
HEADINGS = (
    "iteration",
    "trained",
    "traces",
    "dataset",
    "training",
    "held-out",
    "before",
    "verdict",
    "version, now",
    "training, predicted",
    "training, actual",
    "time",
    "cost",
)
PANEL_WIDTH, PANEL_HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 44, 34
HEADER = 44
_DOTS = {"promote": "good", "reject": "bad"}


def write_views(config: PipelineConfig) -> list[KpiRow]:
    """Write kpi.json, kpi.svg and index.html from the records."""
    home, rows = Path(config.pipeline.folder), kpi_rows(config)
    write_kpi(config, rows)
    durable.write_text(home / PICTURE, kpi_svg(config.pipeline.name, rows))
    durable.write_text(home / PAGE, pipeline_page(config, rows))
    return rows


def pipeline_page(config: PipelineConfig, rows: Sequence[KpiRow]) -> str:
    schedule = "" if config.schedule is None else f" · schedule {config.schedule}, kept by the cluster"
    home = Path(config.pipeline.folder)
    return render_page(
        Path(__file__).with_name("pipeline.html"),
        title=f"Pipeline {config.pipeline.name}",
        facts=f"{len(rows)} iterations · starts from {config.pipeline.start_from}{schedule} · posttrain {__version__}",
        picture=kpi_svg(config.pipeline.name, rows),
        headings=HEADINGS,
        cells=map(cells, rows),
        rows=rows,
        iterations=[(one, [_stage(one, name, home) for name in STAGES]) for one in reversed(read_iterations(home))],
        when=when,
    )


def cells(row: KpiRow) -> tuple[str, ...]:
    """The values under HEADINGS, for the page and for the terminal."""
    interval = (
        "" if row.score_low is None or row.score_high is None else f" [{row.score_low:.3f}, {row.score_high:.3f}]"
    )
    cost = f"{row.device_hours:.3g} device h" if row.cost is None else f"{row.cost:.3g}"
    return (
        str(row.iteration),
        row.start,
        "–" if row.traces_reward is None else f"reward {row.traces_reward:.4f}",
        row.dataset or "–",
        "–" if row.training_value is None else f"{row.training_metric} {row.training_value:.4f}",
        "–" if row.score is None else f"{row.score_metric} {row.score:.4f}{interval}",
        "–" if row.incumbent_score is None else f"{row.incumbent_score:.4f}",
        row.reached,
        "–" if row.version is None else f"{row.version}, {row.stage or 'stage unknown'}",
        row.predicted.text if row.predicted else "not predicted" if row.not_predicted else "–",
        row.actual.text if row.actual else "–",
        duration(row.seconds),
        cost,
    )


def _stage(iteration: Iteration, name: str, home: Path) -> tuple[str, str, str, str]:
    """Its name, its time, its outcome and the address of its report."""
    mark, record = iteration.stages.get(name), iteration.record(name)
    if record is not None:
        time = "reused" if mark is not None and mark.reused else duration(record.seconds)
        # "./" in front: a file may be called javascript:…
        report = "" if record.report is None else "./" + quote(relative(record.report, home))
        return name, time, record.outcome.headline, report
    if mark is not None and mark.skipped and not mark.outdated:
        return name, "", f"skipped: {mark.skipped}", ""
    return name, "", "stopped here" if iteration.running == name else "–", ""


# -- the picture -------------------------------------------------------------------------------------------------------


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
        _line_panel(
            rows,
            0,
            f"training {metric}",
            "dashed: mean reward of the traces",
            values=[row.training_value for row in rows],
            dashed=[row.traces_reward for row in rows],
            dots=["dot a" for row in rows],
        ),
        _line_panel(
            rows,
            1,
            f"held-out {score}",
            "candidate with its interval; dashed: what it was compared with",
            values=[row.score for row in rows],
            dashed=[row.incumbent_score for row in rows],
            dots=[_DOTS.get(row.verdict or "", "open") for row in rows],
            intervals=[(row.score_low, row.score_high) for row in rows],
        ),
        _bar_panel(rows, "cost" if with_price else "device hours", costs, column=0),
        _bar_panel(rows, f"time in {'hours' if long else 'minutes'}", times, column=1),
    ]


def _frame(rows: Sequence[KpiRow], values: Sequence[float], column: int, line: int, *, from_zero: bool) -> Frame:
    left, top = column * PANEL_WIDTH, HEADER + line * PANEL_HEIGHT
    low, high = value_range([0.0, *values] if from_zero else values)
    x = Axis(rows[0].iteration - 0.6, rows[-1].iteration + 0.6, left + LEFT, left + PANEL_WIDTH - RIGHT)
    return Frame(PANEL_WIDTH, PANEL_HEIGHT, x, Axis(low, high, top + PANEL_HEIGHT - BOTTOM, top + TOP))


def _panel(frame: Frame, name: str, note: str, *drawn: str) -> str:
    left, top = frame.x.pixel_low - LEFT + 20, frame.y.pixel_high - TOP
    words = f'<text class="name" x="{left}" y="{top + 18}">{escape(name)}</text>'
    if note:
        words += f'<text class="key" x="{left}" y="{top + 34}">{escape(note)}</text>'
    return words + frame.grid(num_x=8, num_y=5) + "".join(drawn)


def _line_panel(
    rows: Sequence[KpiRow],
    column: int,
    name: str,
    note: str,
    *,
    values: Sequence[float | None],
    dashed: Sequence[float | None],
    dots: Sequence[str],
    intervals: Sequence[tuple[float | None, float | None]] = (),
) -> str:
    """A line with a dot for each iteration, in the colours of `dots`, and a second, dashed line."""
    places = [row.iteration for row in rows]
    known = [value for value in (*values, *dashed, *chain(*intervals)) if value is not None]
    frame = _frame(rows, known, column, 0, from_zero=False)
    pixels = frame.pixels(places, values)
    other, main = (
        f'<path class="line {colour}" d="{path_of(drawn)}"/>'
        for colour, drawn in (("b", frame.pixels(places, dashed)), ("a", pixels))
    )
    ranges = [
        f'<line class="reach" x1="{frame.x(place)}" x2="{frame.x(place)}" y1="{frame.y(low)}" y2="{frame.y(high)}"/>'
        for place, (low, high) in zip(places, intervals, strict=False)
        if low is not None and high is not None
    ]
    circles = [
        f'<circle class="{dot}" cx="{pixel[0]}" cy="{pixel[1]}" r="4"><title>iteration {row.iteration}: '
        f"{escape(row.reached)}</title></circle>"
        for row, dot, pixel in zip(rows, dots, pixels, strict=True)
        if pixel is not None
    ]
    return _panel(frame, name, note, other, *ranges, main, *circles)


def _bar_panel(rows: Sequence[KpiRow], name: str, values: Sequence[float | None], *, column: int) -> str:
    frame = _frame(rows, [value for value in values if value is not None], column, 1, from_zero=True)
    half = max(2.0, min(36.0, 0.6 * (frame.x(1) - frame.x(0)))) / 2
    bars = [
        frame.bar(frame.x(row.iteration) - half, frame.x(row.iteration) + half, value, kind="bar", tip=label(value))
        for row, value in zip(rows, values, strict=True)
        if value is not None
    ]
    return _panel(frame, name, "", *bars)
