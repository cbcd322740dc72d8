#!/usr/bin/env python3
"""Whether a run learns as much with an option as without it: GRPO from the same weights, over several seeds.

    python bench/equal_learning.py --seeds 1 2 3 4 5 --variants plain age-1 age-2 --jobs 2  the demo; an hour
    python bench/equal_learning.py --seeds 1 --variants plain age-1 --steps 2                    a minute
    python bench/equal_learning.py --config configs/grpo_smollm2_gsm8k.yaml --set policy.model_name=SFT \\
        --variants plain age-1 age-2 fp8 --jobs 20 --steps 60                                    one GPU

Each run is a process of its own, `--jobs` of them at a time. The table has accuracy on held-out problems after the last
step as mean ± standard error over the seeds, the difference to `plain` seed by seed, reward and length in the last
fifth of the steps, and how old the trained tokens were. A run that is complete is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from machine import facts, resolve_device
from tables import table, write_json

from posttrain.apps.demo.arithmetic import build_model, write_data
from posttrain.apps.demo.show import grpo_overrides, sft_overrides
from posttrain.build import TrainingRun
from posttrain.config import load_config


def at_age(age: int) -> list[str]:
    return [
        f"grpo.async_grpo={{enabled: true, max_trajectory_age_steps: {age}}}",
        "loss_fn.use_importance_sampling_correction=true",
    ]


VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "age-1": at_age(1),
    "age-2": at_age(2),
    "fp8": ["policy.generation.native_cfg.precision=fp8"],
}


class Run(NamedTuple):
    variant: str
    seed: int
    accuracy: float
    reward: float  # mean of the last fifth of the steps, as the others
    length: float
    stale: float  # share of the trained tokens that an older policy sampled
    mean_age: float
    sampler_gap: float  # mean exp of the absolute difference to the trainer's log-probabilities


def train(kind: str, config: Path | None, overrides: list[str]) -> None:
    code = TrainingRun(
        load_config(kind, config, overrides), title=f"{kind}: learning with and without an option"
    ).execute()
    if code != 0:
        raise SystemExit(code)


def run_one(args: argparse.Namespace, seed: int, variant: str | None) -> None:
    """In a process of its own. Without a variant: the SFT that the demo's runs of this seed begin from."""
    folder = args.folder / f"seed-{seed}"
    if variant is None:
        if not (folder / "model").exists():
            build_model(folder / "model", seed)
            write_data(folder / "data", seed)
        where = [word for word in args.set if word.startswith(("policy.device=", "policy.precision="))]
        train("sft", None, [*sft_overrides(folder, seed), *where])
        return
    settings = [] if args.config else grpo_overrides(folder, seed, args.steps)
    settings += [f"grpo.max_num_steps={args.steps}", f"grpo.seed={seed}", *args.set, *VARIANTS[variant]]
    train("grpo", args.config, [*settings, f"checkpointing.checkpoint_dir={folder / variant}"])


def run_all(args: argparse.Namespace) -> list[Run | None]:
    def start(seed: int, variant: str | None) -> Run | None:
        name = variant or "sft"
        args.folder.mkdir(parents=True, exist_ok=True)
        log = args.folder / f"seed-{seed}-{name}.log"
        words = [*sys.argv, "--one", str(seed), *([variant] if variant else [])]
        with log.open("w") as output:
            code = subprocess.run(
                [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        print(f"seed {seed}, {name}: {'done' if code == 0 else f'exit code {code}, see {log}'}", flush=True)
        return result_of(args.folder, seed, variant, args.steps) if variant and code == 0 else None

    with ThreadPoolExecutor(args.jobs) as pool:
        if args.config is None:
            list(pool.map(lambda seed: start(seed, None), args.seeds))
        return list(
            pool.map(lambda pair: start(*pair), [(seed, name) for seed in args.seeds for name in args.variants])
        )


def result_of(folder: Path, seed: int, variant: str, num_steps: int) -> Run | None:
    """None if the run has not come to its last step."""
    path = folder / f"seed-{seed}" / variant / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    steps = [row for row in rows if "train/reward" in row]
    if not accuracy or not steps or steps[-1]["step"] != num_steps:
        return None
    last = steps[-max(1, len(steps) // 5) :]

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in last)

    return Run(
        variant,
        seed,
        accuracy[-1],
        mean("train/reward"),
        mean("train/mean_generation_length"),
        mean("train/stale_token_fraction"),
        mean("train/trajectory_age_mean"),
        mean("train/token_mult_prob_error"),
    )


def error_of_mean(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def mean_and_error(values: list[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}} ± {error_of_mean(values):{form.lstrip('+')}}"


def summary(runs: list[Run]) -> str:
    plain = {run.seed: run for run in runs if run.variant == "plain"}
    rows = []
    for variant in VARIANTS:
        these = [run for run in runs if run.variant == variant]
        pairs = [(run, plain[run.seed]) for run in these if variant != "plain" and run.seed in plain]
        if these:
            rows.append(
                [
                    variant,
                    len(these),
                    mean_and_error([run.accuracy for run in these], ".1%"),
                    mean_and_error([run.accuracy - base.accuracy for run, base in pairs], "+.1%") if pairs else "",
                    mean_and_error([run.reward for run in these], ".3f"),
                    mean_and_error([run.reward - base.reward for run, base in pairs], "+.3f") if pairs else "",
                    statistics.fmean(run.length for run in these),
                    statistics.fmean(run.mean_age for run in these),
                    f"{statistics.fmean(run.stale for run in these):.0%}",
                    f"{statistics.fmean(run.sampler_gap for run in these):.4f}",
                ]
            )
    header = [
        "",
        "seeds",
        "held-out accuracy",
        "minus plain",
        "reward",
        "minus plain",
        "length",
        "mean age",
        "stale",
        "gap",
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["plain", "age-1", "age-2"])
    parser.add_argument("--config", type=Path, help="a GRPO run with validation (default: the demo's, after its SFT)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting of every run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("results/equal_learning"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args, int(args.one[0]), args.one[1] if len(args.one) > 1 else None)
        return
    found = run_all(args)
    runs = [run for run in found if run is not None]
    print(summary(runs))
    write_json(args.out, {"machine": facts(resolve_device("auto")), "runs": [run._asdict() for run in runs]})
    if len(runs) < len(found):
        raise SystemExit(f"{len(found) - len(runs)} of {len(found)} runs have no result")


if __name__ == "__main__":
    main()
