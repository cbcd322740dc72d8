"""The reward curve of a run as a picture of its own: SVG without any library, PNG with matplotlib (extra `dev`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from posttrain.reporting import scales
from posttrain.reporting.charts import path_of
from posttrain.reporting.run_data import Series, load_run
from posttrain.reporting.scales import Axis, label
from posttrain.reporting.wording import headline_metric, validation_metric

WIDTH, HEIGHT = 820, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 74, 48
# Its own colours: the picture stands in a README, where no style sheet of ours reaches. It follows the reader's theme.
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.page { fill: #ffffff; stroke: #e3e6eb } .grid { stroke: #edf0f3 } .tick { fill: #6a7280; font-size: 12px }
.title { fill: #16191d; font-size: 16px; font-weight: 600 } .key { fill: #5b6472; font-size: 12.5px }
.raw { fill: none; stroke-width: 1.2; opacity: .35 } .line { fill: none; stroke-width: 2.4 }
.raw, .line { stroke-linejoin: round; stroke-linecap: round }
.a { stroke: #2563c9 } .b { stroke: #d9730d } .dot { fill: #ffffff; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #181c22; stroke: #2a3039 } .grid { stroke: #242a32 } .tick { fill: #8b94a3 } .title { fill: #e6e9ee }
.key { fill: #a0a8b5 } .a { stroke: #6ea3f7 } .b { stroke: #f0a04b } .dot { fill: #181c22 } }
"""


def _curves(folder: Path) -> tuple[str, list[Series]]:
    """The title and the non-empty ones of the two headline curves: training, validation."""
    run = load_run(folder)
    training_key, _ = headline_metric(run.algorithm)
    training_name = training_key.removeprefix("train/")
    series = [run.series(training_key, f"training {training_name}")]
    validation_key, _ = validation_metric(run.rows)
    if validation_key:
        series.append(run.series(validation_key, f"validation {validation_key.removeprefix('validation/')}"))
    return run.title, [one for one in series if not one.is_empty]


def reward_curve_svg(folder: Path) -> str:
    """The headline curves as a self-contained SVG document; without data it says so in the picture."""
    title, series = _curves(Path(folder))
    values = [value for one in series for value in one.values if value is not None]
    steps = [step for one in series for step in one.steps] or [0, 1]
    low, high = scales.value_range(values)
    pad = 0.5 if min(steps) == max(steps) else 0.0
    x = Axis(min(steps) - pad, max(steps) + pad, LEFT, WIDTH - RIGHT)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y)]
    for index, one in enumerate(series):
        parts.append(_curve(one, x, y, "ab"[index]))
        parts.append(_key(one, 20 + 190 * index, "ab"[index]))
    if not series:
        parts.append(
            f'<text class="key" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no step recorded yet</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<title>{escape(title)}</title><style>{STYLE}</style><rect class="page" x=".5" y=".5" rx="8" width="{WIDTH - 1}" '
        f'height="{HEIGHT - 1}"/><text class="title" x="20" y="28">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _axes(x: Axis, y: Axis) -> str:
    parts = []
    for value in scales.ticks(y.low, y.high, 7):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 10}" y="{y(value) + 4}" text-anchor="end">{label(value)}</text>')
    for value in scales.ticks(x.low, x.high, 10, whole=True):
        parts.append(f'<text class="tick" x="{x(value)}" y="{HEIGHT - 28}" text-anchor="middle">{value:.0f}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>'
    )
    return "".join(parts)


def _curve(series: Series, x: Axis, y: Axis, colour: str) -> str:
    points = scales.buckets(series.steps, series.values, 600)

    def pixels(values: Sequence[float | None]) -> list[tuple[float, float] | None]:
        pairs = zip(points, values, strict=True)
        return [None if value is None else (x(point.step), y(value)) for point, value in pairs]

    means = [point.mean for point in points]
    if series.smooth and len(points) >= 20:
        smooth = scales.smoothed(means)
        return (
            f'<path class="raw {colour}" d="{path_of(pixels(means))}"/>'
            f'<path class="line {colour}" d="{path_of(pixels(smooth))}"/>'
        )
    places = [pixel for pixel in pixels(means) if pixel is not None]
    dots = "".join(f'<circle class="dot {colour}" cx="{a}" cy="{b}" r="3.5"/>' for a, b in places)
    return f'<path class="line {colour}" d="{path_of(pixels(means))}"/>{dots}'


def _key(series: Series, left: float, colour: str) -> str:
    last = "" if series.last is None else f": {label(series.last)}"
    line = f'<path class="line {colour}" d="M{left} 46h16"/>'
    return f'{line}<text class="key" x="{left + 22}" y="50">{escape(series.name + last)}</text>'


def reward_curve_png(folder: Path, out: Path) -> Path:
    """The same picture as a PNG. matplotlib is part of the extra `dev` and is not needed by anything else."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("reward_curve_png needs matplotlib: pip install 'posttrain[dev]'") from error
    title, series = _curves(Path(folder))
    figure = Figure(figsize=(8.2, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for one, colour in zip(series, ("#2563c9", "#d9730d"), strict=False):
        values = [float("nan") if value is None else value for value in one.values]
        smooth = one.smooth and len(values) >= 20
        if smooth:
            axes.plot(one.steps, values, color=colour, linewidth=0.8, alpha=0.35)
            values = [float("nan") if value is None else value for value in scales.smoothed(one.values)]
        axes.plot(
            one.steps, values, color=colour, linewidth=1.8, marker="" if smooth else "o", markersize=4, label=one.name
        )
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#e3e6eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if series:
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(out)
    return Path(out)
