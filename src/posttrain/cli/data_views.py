"""Statistics of traces, reports of pairs and advice, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.cli.tables import facts, table
from posttrain.data.errors import DataError
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.data.traces.advice import Advice
    from posttrain.data.traces.report import PairReport, ReadReport, Tally
    from posttrain.data.traces.statistics import TraceStatistics

PICTURE_ENDINGS = (".svg", ".png")
_TITLED: JsonObject = {"title_justify": "left", "padding": (0, 2), "pad_edge": True, "header_style": "bold"}
BAR_WIDTH = 44
EIGHTHS = " ▏▎▍▌▋▊▉"
BAR_STYLES = {"low": "yellow", "mid": "bright_black", "high": "blue"}


def show_statistics(console: Console, found: TraceStatistics, path: str) -> None:
    console.print(Text(path, style="bold"))
    about = facts(
        {
            "files": f"{found.read.files:,}",
            "rows": f"{found.read.rows:,}",
            "traces used": _of(found.traces, found.read.rows),
            "groups": f"{found.groups:,}, {found.traces / max(found.groups, 1):.3g} traces each",
            "  with signal": f"{_of(found.with_signal, found.groups)}: rewards differ",
            "  without": (
                f"{found.all_equal:,} with all rewards equal, {found.single:,} with a single trace"
                if found.groups
                else "0"
            ),
            "  by prompt": (
                f"{_of(found.prompts_with_signal, found.pairs.prompts)}: what training compares, within one prompt"
                if found.read.ids_with_several_prompts
                else ""
            ),
            "group sizes": ", ".join(f"{name}: {count:,}" for name, count in found.group_sizes.items() if count),
            "rewards": (
                f"mean {found.reward_mean:.4g}, standard deviation {found.reward_std:.4g}, "
                f"from {found.reward_min:.4g} to {found.reward_max:.4g}"
            ),
            "duplicates": (
                f"{found.exact_duplicates:,} responses repeat an earlier one to the same prompt, "
                f"{found.conflicting_duplicates:,} of them with another reward"
            ),
        }
    )
    console.print(about)
    if found.traces:
        console.print()
        _histogram(console, found)
    _lengths(console, found)
    _models(console, found)
    show_losses(console, found.read)
    console.print()
    show_pairs(console, found.pairs, heading="pairs that these rules would make")


def _histogram(console: Console, found: TraceStatistics) -> None:
    most = max(found.bin_counts) or 1
    heading = Text("reward")
    for kind, words in (
        ("low", f"below {found.rules.rejected_below:g}"),
        ("mid", "between"),
        ("high", f"{found.rules.preferred:g} or more"),
    ):
        heading.append("   █ ", BAR_STYLES[kind]).append(words, "bright_black")
    console.print(heading)
    edges = [f"{edge:.4g}" for edge in found.bin_edges]
    ranges = [f"{left}–{right}" for left, right in pairwise(edges)]
    width = max(map(len, ranges))
    kinds = found.bin_kinds
    for index, count in enumerate(found.bin_counts):
        before, after = found.bin_counts[max(index - 1, 0)], found.bin_counts[min(index + 1, len(found.bin_counts) - 1)]
        if count == before == 0 and index:  # of empty bins in a row one line is enough
            continue
        if count == after == 0 and index + 1 < len(found.bin_counts):
            console.print(Text(f"{'…':>{width}}", "bright_black"))
            continue
        eighths = round(8 * BAR_WIDTH * count / most) if count else 0
        eighths = max(eighths, 1) if count else 0
        bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        line = Text(f"{ranges[index]:>{width}} ", "bright_black")
        line.append(bar, BAR_STYLES[kinds[index]])
        line.append(f" {count:,}" if count else "", "bright_black")
        console.print(line)


def _lengths(console: Console, found: TraceStatistics) -> None:
    lengths = found.lengths
    if lengths is None:
        return
    sample = "" if lengths.sampled >= found.traces else f", of a sample of {lengths.sampled:,} traces"
    names = ["median" if name == "p50" else name for name in lengths.prompt]
    rows = table("", *names, title=f"\nlength in {lengths.unit}{sample}", **_TITLED)
    for role, values in (("prompt", lengths.prompt), ("response", lengths.response)):
        rows.add_row(role, *(f"{value:,}" for value in values.values()))
    console.print(rows)


def _models(console: Console, found: TraceStatistics) -> None:
    if not found.models:
        return
    rows = table("model", "traces", "mean reward", title="\nmodels", **_TITLED)
    for name, (count, mean) in list(found.models.items())[:12]:
        rows.add_row(Text(name), f"{count:,}", f"{mean:.3f}")
    console.print(rows)


def show_losses(console: Console, read: ReadReport) -> None:
    """What was dropped and why; nothing is printed if nothing was."""
    if not read.problems and not read.filtered and not read.broken_files and not read.ids_with_several_prompts:
        return
    console.print()
    for file, problem in read.broken_files.items():
        console.print(Text("broken file: ", "red").append(f"{file}: {problem}", "default"))
    _tallies(console, read.problems, "cannot be used", "red")
    _tallies(console, read.filtered, "left out", "yellow")
    if read.ids_with_several_prompts:
        line = f"{read.ids_with_several_prompts:,} group ids cover several prompts; training compares within one only"
        console.print(Text("note: ", "yellow").append(line, "default"))


def _tallies(console: Console, tallies: Mapping[str, Tally], what: str, style: str) -> None:
    for reason, tally in tallies.items():
        more = ", …" if tally.count > len(tally.examples) else ""
        line = Text(f"{what}: ", style).append(f"{tally.count:,} rows, {reason}", "default")
        console.print(line.append(f" ({'; '.join(tally.examples)}{more})", "bright_black"))


def show_pairs(console: Console, pairs: PairReport, heading: str) -> None:
    margin = "" if pairs.mean_margin is None else f", rewards {pairs.mean_margin:.3g} apart on average"
    console.print(
        Text(f"{heading}: ", "bold").append(
            f"{pairs.pairs:,} from {_of(pairs.prompts_with_pairs, pairs.prompts)} prompts{margin}", "not bold"
        )
    )
    for reason, count in pairs.none.most_common():
        console.print(Text(f"  no pair from {count:,} prompts: {reason}", "bright_black"))
    if pairs.over_the_cap:
        console.print(Text(f"  {pairs.over_the_cap:,} further pairs over max_pairs_per_prompt", "bright_black"))
    for reason, count in pairs.not_writable.items():
        console.print(Text("not written: ", "yellow").append(f"{count:,} pairs, {reason}", "default"))


def show_advice(console: Console, advice: Advice) -> None:
    console.print(Text(f"{advice.method}: ", "bold green").append(advice.reason, "default"))
    console.print()
    for criterion in advice.criteria:
        mark = Text("yes  " if criterion.holds else "no   ", "green" if criterion.holds else "bright_black")
        console.print(mark.append(f"{criterion.situation} → {criterion.speaks_for}", "default"))
        console.print(Text(f"     {criterion.numbers}", "bright_black"))
    for caution in advice.cautions:
        console.print(Text("note: ", "yellow").append(caution, "default"))
    console.print()
    console.print(Text("next:", "bold"))
    for command in advice.commands:
        console.print(Text(f"  {command}"), soft_wrap=True)
    console.print(Text("  (with policy.model_name=YOUR_MODEL, or your --config, for the run)", "bright_black"))


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.0%})" if whole else f"{part:,}"


def check_picture(file: Path) -> None:
    """InputError if the picture could not be written. Called before the traces are read, which may take hours."""
    if file.suffix not in PICTURE_ENDINGS:
        raise DataError(f"{file}: a picture is written as {' or '.join(PICTURE_ENDINGS)}")
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
        from posttrain.reporting.charts import reward_histogram

        bars = found.bin_edges, found.bin_counts, found.bin_kinds
        file.write_text(reward_histogram(title, found.headline, *bars, unit="traces"), encoding="utf-8")
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
        color=[colours[kind] for kind in found.bin_kinds],
    )
    axes.set_title(f"{title}\n{found.headline}", loc="left", fontsize=10)
    axes.set_xlabel("reward")
    axes.set_ylabel("traces")
    axes.grid(axis="y", color="#e3e6eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
