"""`posttrain plan`: memory and time of a run before it starts, and beside what a run has measured."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.options import Option
from posttrain.cli.overrides_parser import OverridesParser, number
from posttrain.config import KINDS, ConfigError, RunConfig, guess_kind, load_config
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from posttrain.apps.plan.measured import Measured
    from posttrain.apps.plan.plan import RunCost, RunEstimate
    from posttrain.apps.plan.proposal import Proposal

PRICE = number(float, Option(more_than=0))
EPILOG = """\
examples:
  posttrain plan --config configs/grpo.yaml policy.model_name=Qwen/Qwen3-8B
  posttrain plan grpo model=llama-8b max_length=1024 --prompt-tokens 128 --answer-tokens 600
  posttrain plan --run results/grpo                              predicted beside measured
  posttrain plan --config configs/dpo.yaml --gpu h100 --gpu-hour-price 2.5     what the run costs
  posttrain plan --on eks.yaml --config configs/grpo.yaml        on machines of a cluster profile: hours, dollars, Spot

Needs no GPU and loads no weights: the config.json of the model is all that is read. policy.model_name may also be one
of the shapes llama-0.5b, llama-1.5b, llama-8b, qwen-0.5b, qwen-1.5b and qwen-8b. Exits with 64 if something does not
fit, and says which setting would help.
"""


def add_arguments(parser: OverridesParser) -> None:
    parser.epilog = EPILOG
    parser.usage = (
        f"posttrain plan [{'|'.join(KINDS)}] [--config FILE] [--gpu NAME] [--on PROFILE] [--run FOLDER] [options] "
        "[key=value …]"
    )
    parser.config_file()
    parser.option(
        "--gpu NAME", "h200 (default), h100, a100-80gb, a100-40gb, b200 or l40s; with --on that of the machine"
    )
    parser.option("--on PROFILE", "cluster profile (docs/launch.md): shows what the run costs there", type=Path)
    parser.option("--run FOLDER", "a run's folder: compare with what it measured", type=Path, dest="run_folder")
    parser.option("--prompt-tokens N", "mean length of prompts", type=float)
    parser.option("--answer-tokens N", "mean length of answers", type=float)
    parser.option("--gpu-hour-price N", "price of one GPU for an hour: shows what the run costs", type=PRICE)
    parser.switch("--json", "print everything as JSON")
    kinds = f"{', '.join(KINDS)} (guessed from the file if left out)"
    parser.words("KIND key=value", f"{kinds}, then settings that override the file's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.cost import cost_on_cluster, gpu_of
    from posttrain.apps.plan.measured import read_measured
    from posttrain.apps.plan.plan import cost_of, estimate_run, find_gpu, planned_step_s, splits_of
    from posttrain.apps.plan.proposal import explain, propose
    from posttrain.config.cluster_profile import ClusterProfile
    from posttrain.config.loader import load_standalone

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
    rewards_s = measured.get("timing/train/reward_calculation") if measured is not None else None
    splits = splits_of(found, config, rewards_s or 0.0)
    planned_s = planned_step_s(found, config, rewards_s or 0.0)
    cost = cost_of(config, planned_s, args.gpu_hour_price) if args.gpu_hour_price is not None else None
    on_cluster = None
    if profile is not None:
        step_s = measured.get("timing/train/total_step_time") if measured is not None else None
        source = "measured" if step_s else "planned"
        on_cluster = cost_on_cluster(profile, config, step_s or planned_s, source)
    if args.json:
        result = _as_json(found, config, measured, proposal, cost)
        if splits is not None:
            result["split"] = splits.as_json()
        if on_cluster is not None:
            result["on_cluster"] = on_cluster.as_json()
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        from posttrain.cli.plan_views import show_plan

        show_plan(found, config, measured, proposal, splits, [] if cost is None else cost.lines(), on_cluster)
    if problem := explain(found):
        raise InputError(f"this does not fit:\n{problem}")
    return 0


def _config(args: argparse.Namespace) -> RunConfig:
    words = list(args.words)
    kind = words.pop(0) if words and words[0] in KINDS else None
    path = args.config
    if path is None and args.run_folder is not None:
        from posttrain.reporting.run_files import CONFIG_FILE, newest_config

        path = newest_config(args.run_folder)
        if not args.run_folder.is_dir():
            raise InputError(f"--run {args.run_folder}: no such folder; expected the folder of a run")
        if not path.is_file():
            raise InputError(f"--run {args.run_folder}: no {CONFIG_FILE} there; give the run's config with --config")
    if kind is None:
        if path is None:
            unknown = f"{words[0]!r} is no kind of run: " if words and "=" not in words[0] else ""
            raise ConfigError(
                f"{unknown}give the kind of run ({', '.join(KINDS)}), or give --config FILE or --run FOLDER"
            )
        kind = guess_kind(path)
    if kind not in KINDS:
        raise InputError(f"{path} is the config of an evaluation; the planner is for training: {', '.join(KINDS)}")
    loaded = load_config(kind, path, words)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config: RunConfig = loaded.config
    return config


def _as_json(
    found: RunEstimate, config: RunConfig, measured: Measured | None, proposal: Proposal | None, cost: RunCost | None
) -> JsonObject:
    from posttrain.apps.plan.measured import compare
    from posttrain.apps.plan.plan import as_json
    from posttrain.apps.plan.proposal import remedies

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
