"""The reward histogram as a picture: SVG without any library, PNG with matplotlib (extra `dev`)."""

from __future__ import annotations

from html import escape
from pathlib import Path

from posttrain.data.errors import DataError
from posttrain.data.traces.statistics import TraceStatistics
from posttrain.reporting import scales
from posttrain.reporting.scales import Axis, label

WIDTH, HEIGHT = 820, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 74, 48
ENDINGS = (".svg", ".png")
# Its own colours, as in reporting/plot.py: it stands where no style sheet of ours reaches, and follows the reader's theme.
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.page { fill: #ffffff; stroke: #e3e6eb } .grid { stroke: #edf0f3 } .tick { fill: #6a7280; font-size: 12px }
.title { fill: #16191d; font-size: 16px; font-weight: 600 } .key { fill: #5b6472; font-size: 12.5px }
.low { fill: #d9730d } .mid { fill: #9aa3af } .high { fill: #2563c9 }
@media (prefers-color-scheme: dark) {
.page { fill: #181c22; stroke: #2a3039 } .grid { stroke: #242a32 } .tick { fill: #8b94a3 } .title { fill: #e6e9ee }
.key { fill: #a0a8b5 } .low { fill: #f0a04b } .mid { fill: #6a7280 } .high { fill: #6ea3f7 } }
"""


def bin_kind(found: TraceStatistics, index: int) -> str:
    """Whether a bar's rewards are rejected ("low"), preferred ("high") or neither ("mid"), judged by its middle."""
    middle = (found.bin_edges[index] + found.bin_edges[index + 1]) / 2
    return "high" if middle >= found.rules.preferred else "low" if middle < found.rules.rejected_below else "mid"


def headline(found: TraceStatistics) -> str:
    return f"{found.traces:,} traces in {found.groups:,} groups, {found.with_signal:,} of them with different rewards"


def reward_histogram_svg(found: TraceStatistics, title: str) -> str:
    """A self-contained SVG document."""
    edges, counts = found.bin_edges, found.bin_counts
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = Axis(0, scales.value_range([0, *counts])[1], HEIGHT - BOTTOM, TOP)
    parts = []
    for value in scales.ticks(y.low, y.high, 6):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 10}" y="{y(value) + 4}" text-anchor="end">{label(value)}</text>')
    for index, count in enumerate(counts):
        left, right, top = x(edges[index]) + 1, x(edges[index + 1]) - 1, y(count)
        shape = f'x="{left:g}" y="{top:g}" width="{right - left:g}" height="{HEIGHT - BOTTOM - top:g}" rx="1.5"'
        tip = f"{edges[index]:g} to {edges[index + 1]:g}: {count:,} traces"
        parts.append(f'<rect class="{bin_kind(found, index)}" {shape}><title>{tip}</title></rect>')
    for value in scales.ticks(x.low, x.high, 10):
        parts.append(f'<text class="tick" x="{x(value)}" y="{HEIGHT - 28}" text-anchor="middle">{label(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">reward</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<title>{escape(title)}</title><style>{STYLE}</style><rect class="page" x=".5" y=".5" rx="8" width="{WIDTH - 1}" '
        f'height="{HEIGHT - 1}"/><text class="title" x="20" y="28">{escape(title)}</text>'
        f'<text class="key" x="20" y="50">{escape(headline(found))}</text>{"".join(parts)}</svg>\n'
    )


def check_picture(file: Path) -> None:
    """Said before hours of reading, not after."""
    if file.suffix not in ENDINGS:
        raise DataError(f"{file}: a picture is written as {' or '.join(ENDINGS)}")
    if not file.parent.is_dir():
        raise DataError(f"{file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise DataError(f"{file}: is a folder; name the file to draw into")
    if file.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise DataError(
                f"{file}: PNG needs matplotlib (pip install 'posttrain[dev]'); .svg needs nothing"
            ) from error


def write_picture(found: TraceStatistics, title: str, file: Path) -> None:
    if file.suffix == ".svg":
        file.write_text(reward_histogram_svg(found, title), encoding="utf-8")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    colours = {"low": "#d9730d", "mid": "#9aa3af", "high": "#2563c9"}
    widths = [right - left for left, right in zip(found.bin_edges, found.bin_edges[1:], strict=False)]
    axes.bar(
        found.bin_edges[:-1],
        found.bin_counts,
        width=[0.92 * width for width in widths],
        align="edge",
        color=[colours[bin_kind(found, index)] for index in range(len(widths))],
    )
    axes.set_title(f"{title}\n{headline(found)}", loc="left", fontsize=10)
    axes.set_xlabel("reward")
    axes.set_ylabel("traces")
    axes.grid(axis="y", color="#e3e6eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
