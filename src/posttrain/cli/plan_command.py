"""`posttrain plan`: memory and time of a run before it starts, and beside what a run has measured; as JSON, or drawn in
a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from posttrain.apps.launch.cost import CostReport, cost_on_cluster, gpu_of, planned_save_s
from posttrain.apps.options import Option
from posttrain.apps.plan.groups import PlannedGroup, planned_groups, proposed_placement
from posttrain.apps.plan.measured import Measured, compare, read_measured
from posttrain.apps.plan.plan import (
    RunCost,
    RunEstimate,
    as_json,
    assumptions,
    cost_of,
    estimate_run,
    find_gpu,
    planned_step_s,
    splits_of,
)
from posttrain.apps.plan.proposal import Proposal, explain, propose, remedies
from posttrain.cli.overrides_parser import OverridesParser, number
from posttrain.cli.tables import QUIET, console, table
from posttrain.config import TRAINING_NAMES, RunConfig
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone, load_words
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.policy.memory.peak_memory import GIB
from posttrain.reporting.run_files import CONFIG_FILE, newest_config

if TYPE_CHECKING:
    from rich.table import Table

    from posttrain.apps.plan.split import Splits

PRICE = number(float, Option(more_than=0))
GOAL = 0.15  # an error of the prediction that is still called good


def add_arguments(parser: OverridesParser) -> None:
    parser.usage = (
        f"posttrain plan [{'|'.join(TRAINING_NAMES)}] [--config FILE] [--gpu NAME] [--on PROFILE] [--run FOLDER] "
        "[options] [key=value …]"
    )
    parser.config_file()
    parser.option("--gpu NAME", "h200 (default), h100, a100-80gb, a100-40gb, b200, l40s; with --on the machine's")
    parser.option("--on PROFILE", "cluster profile (docs/launch.md): shows what the run costs there", type=Path)
    parser.option("--run FOLDER", "a run's folder: compare with what it measured", type=Path, dest="run_folder")
    parser.option("--prompt-tokens N", "mean length of prompts", type=float)
    parser.option("--answer-tokens N", "mean length of answers", type=float)
    parser.option("--gpu-hour-price N", "price of one GPU for an hour: shows what the run costs", type=PRICE)
    parser.switch("--json", "print everything as JSON")
    kinds = f"{', '.join(TRAINING_NAMES)} (guessed from the file if left out)"
    parser.words("KIND key=value", f"{kinds}, then settings that override the file's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    profile = None if args.on is None else load_standalone(ClusterProfile, args.on)
    gpu = find_gpu(args.gpu or (gpu_of(profile) if profile is not None else "h200"))
    config = _config(args)
    measured = read_measured(args.run_folder) if args.run_folder is not None else None
    if measured is not None and not measured.is_on_gpu:
        print(f"warning: {args.run_folder} was made on a CPU; what follows is for a GPU", file=sys.stderr)
    found = estimate_run(
        config,
        gpu,
        lengths=measured.lengths if measured is not None else None,
        prompt_tokens=args.prompt_tokens,
        answer_tokens=args.answer_tokens,
    )
    proposal = propose(found)
    rewards_s, step_s, save_s = (
        None if measured is None else measured.get(f"timing/train/{stage}")
        for stage in ("reward_calculation", "total_step_time", "checkpointing")
    )
    splits = splits_of(found, config, rewards_s or 0.0)
    groups = planned_groups(found, config)
    planned_s = planned_step_s(found, config, rewards_s or 0.0)
    cost = cost_of(config, planned_s, args.gpu_hour_price) if args.gpu_hour_price is not None else None
    on_cluster = None
    if profile is not None:
        step = (step_s, "measured") if step_s else (planned_s, "planned")
        save = (save_s, "measured") if save_s else (planned_save_s(found), "planned")
        on_cluster = cost_on_cluster(profile, config, *step, *save)
    if args.json:
        result = _as_json(found, config, measured, proposal, cost)
        if groups:
            result["placement"] = [group.as_json() for group in groups]
        if splits is not None:
            result["split"] = splits.as_json()
        if on_cluster is not None:
            result["on_cluster"] = on_cluster.as_json()
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        show_plan(found, config, measured, proposal, splits, [] if cost is None else cost.lines(), on_cluster, groups)
    if problem := explain(found):
        words = proposed_placement(found, config)
        own = f"\nwith the reference on GPUs of its own it fits: {' '.join(words)}" if words else ""
        raise InputError(f"this does not fit:\n{problem}{own}")
    for group in groups:
        if not group.fits:
            raise InputError(
                f"this does not fit: {group.name} needs {_gib(group.needed_bytes)} GiB on each of its GPUs, which have "
                f"{gpu.memory_bytes / GIB:.1f}; use a larger GPU or a smaller batch of its passes"
            )
    return 0


def _config(args: argparse.Namespace) -> RunConfig:
    path = args.config
    if path is None and args.run_folder is not None:
        path = newest_config(args.run_folder)
        if not args.run_folder.is_dir():
            raise InputError(f"--run {args.run_folder}: no such folder; expected the folder of a run")
        if not path.is_file():
            raise InputError(f"--run {args.run_folder}: no {CONFIG_FILE} there; give the run's config with --config")
    loaded = load_words(args.words, path, TRAINING_NAMES)
    loaded.print_warnings()
    config: RunConfig = loaded.config
    return config


def _as_json(
    found: RunEstimate, config: RunConfig, measured: Measured | None, proposal: Proposal | None, cost: RunCost | None
) -> JsonObject:
    result = as_json(found, config)
    if proposal is not None:
        result["proposal"] = {"settings": proposal.settings, "total_step_time": proposal.found.time.total_s}
    if cost is not None:
        result["cost"] = {**asdict(cost), "per_step": cost.per_step, "in_all": cost.in_all}
    if not result["fits"]:
        result["remedies"] = [{"settings": remedy.words, "fits": remedy.is_enough} for remedy in remedies(found)]
    if measured is not None:
        result["measured"] = {
            "num_steps": measured.num_steps,
            "comparison": [
                {"what": row.what, "predicted": row.predicted, "measured": row.measured, "error": row.error}
                for row in compare(found, measured)
            ],
        }
    return result


def show_plan(
    found: RunEstimate,
    config: RunConfig,
    measured: Measured | None,
    proposal: Proposal | None,
    splits: Splits | None,
    cost_lines: Sequence[str],
    on_cluster: CostReport | None = None,
    groups: Sequence[PlannedGroup] = (),
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
    if groups:
        out.print("\nplacement: GPUs of each machine", style=QUIET)
        out.print(_placement(groups, config.cluster.num_nodes))
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
        f"{trained}{recomputed}, on {gpus}: {workload.num_samples:.0f} samples a step{each}"
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


def _placement(groups: Sequence[PlannedGroup], num_nodes: int) -> Table:
    machines = range(1, num_nodes + 1)
    rows = table("", *[f"machine {machine}" for machine in machines], "GiB needed on each GPU")
    for group in groups:
        needed = "not known here" if group.needed_bytes is None else _gib(group.needed_bytes)
        counts = [str(group.gpus.get(machine, "")) for machine in machines]
        rows.add_row(group.name, *counts, needed, style=None if group.fits else "red")
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
    faster = f"{found.time.total_s / best.time.total_s - 1:+.0%} speed"
    change = "the present settings do not fit" if found.too_large else faster
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
