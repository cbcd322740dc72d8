"""A plan, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.apps.launch.cost import CostReport
from posttrain.apps.plan.measured import Measured, compare
from posttrain.apps.plan.plan import RunEstimate, assumptions
from posttrain.apps.plan.proposal import Proposal
from posttrain.cli.tables import QUIET, console, table
from posttrain.config import RunConfig
from posttrain.policy.memory.rank import GIB

if TYPE_CHECKING:
    from rich.table import Table

    from posttrain.apps.plan.split import Splits

GOAL = 0.15  # an error of the prediction that is still called good


def show_plan(
    found: RunEstimate,
    config: RunConfig,
    measured: Measured | None,
    proposal: Proposal | None,
    splits: Splits | None,
    cost_lines: Sequence[str],
    on_cluster: CostReport | None = None,
) -> None:
    out = console()
    out.print(_headline(found), style="bold")
    for title, rows in (("GiB on each GPU", _memory(found)), ("seconds of a step", _time(found))):
        out.print()
        out.print(title, style=QUIET)
        out.print(rows)
    out.print()
    for line in _cache_lines(found):
        out.print(line)
    if measured is not None:
        out.print(f"\npredicted and measured (median of {measured.num_steps} steps)", style=QUIET)
        out.print(_comparison(found, measured))
    if proposal is not None:
        out.print("\nproposed", style=QUIET)
        for line in _proposal_lines(found, proposal):
            out.print(line)
    if splits is not None:
        num_gpus = config.cluster.num_workers
        out.print(f"\nsplit of {num_gpus} GPUs between training and sampling, simulated", style=QUIET)
        out.print(_splits(splits))
        for line in _split_lines(splits):
            out.print(line)
    for title, lines in (
        ("cost", cost_lines),
        ("cost on the cluster", on_cluster.lines() if on_cluster is not None else []),
    ):
        if lines:
            out.print(f"\n{title}", style=QUIET)
        for line in lines:
            out.print(line)
    out.print("\nassumed", style=QUIET)
    for line in [*assumptions(found, config), *([] if splits is None else splits.assumptions)]:
        out.print(f"  {line}")


def _headline(found: RunEstimate) -> str:
    workload, settings = found.workload, found.settings
    trained = "all weights" if settings.lora_rank is None else f"LoRA of rank {settings.lora_rank}"
    gpus = found.gpu.name if settings.ranks == 1 else f"{settings.ranks} x {found.gpu.name}"
    each = "" if settings.ranks == 1 else " on each"
    recomputed = ", activations recomputed" if settings.checkpointing else ""
    return (
        f"{workload.kind} of {found.shape.name} ({found.shape.num_weights / 1e9:.2f} billion weights), "
        f"{trained}{recomputed}, on "
        f"{gpus}: {workload.num_samples:.0f} samples a step{each}"
    )


def _memory(found: RunEstimate) -> Table:
    phases = found.memory.phases
    rows = table("", *[phase.name for phase in phases])
    names = list(dict.fromkeys(name for phase in phases for name in phase.items))
    for name in names:
        rows.add_row(name, *[_gib(phase.items.get(name)) for phase in phases])
    rows.add_row("in all", *[Text(_gib(phase.peak_bytes), style="bold") for phase in phases])
    styles = ["green" if found.fits(phase) else "bold red" for phase in phases]
    needed = [f"{phase.needed_bytes / GIB:.1f}{'' if found.fits(phase) else ' !'}" for phase in phases]
    rows.add_row(f"needed, of {found.gpu.memory_bytes / GIB:.1f}", *map(Text, needed, styles))
    return rows


def _gib(num_bytes: float | None) -> str:
    return "" if not num_bytes else f"{num_bytes / GIB:.1f}" if num_bytes >= 0.05 * GIB else "<0.1"


def _time(found: RunEstimate) -> Table:
    time, tokens = found.time, found.workload.num_tokens
    rows = table("", "s", "share", "tokens/s")
    parts = {
        "generation": {"prompts": time.prompts_s, "decoding": time.decoding_s, "capturing graphs": time.capture_s},
        "policy_training": {"forward and backward": time.passes_s, "optimizer": time.optimizer_s},
    }
    for stage, seconds in time.stages.items():
        if not seconds:
            continue
        rows.add_row(stage, _seconds(seconds), f"{seconds / time.total_s:.0%}", f"{tokens / seconds:,.0f}")
        for name, part in parts.get(stage, {}).items():
            if part:
                rows.add_row(Text(f"  {name}", style=QUIET), Text(_seconds(part), style=QUIET))
    rows.add_row(
        "in all", Text(_seconds(time.total_s), style="bold"), "", Text(f"{found.tokens_per_s:,.0f}", style="bold")
    )
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _cache_lines(found: RunEstimate) -> list[str]:
    cache, time, engine = found.memory.cache, found.time, found.settings.engine
    lines = []
    if cache is not None and engine is not None:
        kept = "kept while training" if cache.is_kept else "given up for training"
        lines.append(
            f"KV cache: {cache.num_bytes / GIB:.1f} GiB for {cache.tokens:,.0f} tokens of {cache.bytes_per_token:,} "
            f"bytes, {kept}"
        )
        if cache.is_short:
            lines.append(
                f"  {engine.rows} rows at their longest would take {cache.wanted_bytes / GIB:.1f} GiB: some answers "
                "may have to wait or be computed again"
            )
        lines.append(f"decoding: {time.num_decode_steps:,} steps of {1e3 * time.mean_step_s:.1f} ms")
    row, count = found.workload.passes(found.workload.train, found.shape.window)
    lines.append(f"training: {count:,.0f} micro-batches of {row.tokens:,.0f} tokens; a prompt is computed once in each")
    if items := found.memory.host_items:
        shown = ", ".join(f"{name} {num_bytes / GIB:.1f} GiB" for name, num_bytes in items.items())
        lines.append(f"host memory: {shown}")
    return lines


def _comparison(found: RunEstimate, measured: Measured) -> Table:
    rows = table("", "predicted", "measured", "error")
    for row in compare(found, measured):
        style = "green" if abs(row.error) <= GOAL else "yellow"
        values = [f"{value:,.1f}" if value >= 10 else f"{value:.3f}" for value in (row.predicted, row.measured)]
        unit = f" {row.unit}" if row.unit else ""
        rows.add_row(row.what, *[f"{value}{unit}" for value in values], Text(f"{row.error:+.1%}", style=style))
    return rows


def _proposal_lines(found: RunEstimate, proposal: Proposal) -> list[str]:
    if not proposal.settings:
        return ["  nothing: the settings as they are were the fastest of those tried, to 1 %"]
    best = proposal.found
    faster = found.time.total_s / best.time.total_s - 1
    change = f"{faster:+.0%} speed"
    if found.too_large:
        change = "the present settings do not fit"
    settings = [f"  {name}={value}" for name, value in proposal.settings.items()]
    return [*settings, f"  {best.time.total_s:.1f} s a step ({change}), {best.most_gib:.1f} GiB at most"]


def _splits(splits: Splits) -> Table:
    rows = table("", "train", "sample", "max age", "s a step", "speed", "GiB, training", "GiB, sampling")
    for index, split in enumerate(splits.shown):
        engines = split.config.num_engine_gpus
        fits = not split.found.too_large
        rows.add_row(
            "now" if index == 0 else "",
            str(split.config.num_ranks),
            str(engines or "the same"),
            str(split.max_age),
            _seconds(split.step_s),
            f"{splits.shared.step_s / split.step_s:.2f}",
            *[_gib(split.needed_bytes(sampling=sampling)) for sampling in (False, True)],
            style=None if fits else "red",
        )
    return rows


def _split_lines(splits: Splits) -> list[str]:
    best = splits.best
    if best is None and splits.now.found.too_large:
        return ["  no split that was tried fits; see what would help above"]
    if best is None:
        return ["  nothing better: the split as it is was the fastest of those tried, to 3 %"]
    lines = [f"  {name}={value}" for name, value in splits.proposed.items()]
    if best.max_age > splits.now.max_age:
        steps = "one step" if best.max_age == 1 else f"{best.max_age} steps"
        lines.append(f"  (trains on answers that are up to {steps} old)")
    if splits.now.found.too_large:
        return [*lines, f"  {best.step_s:.1f} s a step; the split as it is does not fit"]
    faster = splits.now.step_s / best.step_s - 1
    return [*lines, f"  {best.step_s:.1f} s a step ({faster:+.0%} speed)"]
