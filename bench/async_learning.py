#!/usr/bin/env python3
"""What asynchronous sampling costs in learning: the demo's GRPO run at several ages and seeds, from the same SFT weights.

    python bench/async_learning.py --seeds 1 2 3 4 5 --ages 0 1 2 --out async_learning.json     an hour on one idle core
    python bench/async_learning.py --seeds 1 --ages 0 1 --steps 2                               a minute

Age 0 is the synchronous run. The table has accuracy on held-out problems after the last step as mean ± standard error over the
seeds, the difference to age 0 seed by seed, and the length of the answers. A run that is complete is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import NamedTuple

from machine import facts
from tables import table, write_json

from posttrain.build import TrainingRun
from posttrain.config import load_config
from posttrain.demo.arithmetic import build_model, write_data
from posttrain.demo.show import grpo_overrides, sft_overrides


class Run(NamedTuple):
    age: int
    seed: int
    accuracy: float
    reward: float  # mean of the last fifth of the steps
    length: float  # of the answers in the last fifth
    stale: float  # share of the trained tokens that an older policy sampled
    mean_age: float


def train(kind: str, overrides: list[str]) -> Path:
    loaded = load_config(kind, None, overrides)
    if (code := TrainingRun(loaded, title=f"{kind}: learning at several ages").execute()) != 0:
        raise SystemExit(code)
    return Path(loaded.config.checkpointing.checkpoint_dir)


def prepare(folder: Path, seed: int) -> None:
    if not (folder / "model").exists():
        build_model(folder / "model", seed)
        write_data(folder / "data", seed)
    train("sft", sft_overrides(folder, seed))


def run_at(folder: Path, seed: int, age: int, steps: int) -> Run:
    asynchronous = [
        f"grpo.async_grpo={{enabled: true, max_trajectory_age_steps: {age}}}",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    settings = grpo_overrides(folder, seed, steps) + [f"checkpointing.checkpoint_dir={folder / f'age-{age}'}"]
    run = train("grpo", settings + (asynchronous if age else []))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_of_run = [row for row in rows if "train/reward" in row]
    last = steps_of_run[-max(1, len(steps_of_run) // 5) :]

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in last)

    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row][-1]
    return Run(
        age,
        seed,
        accuracy,
        mean("train/reward"),
        mean("train/mean_generation_length"),
        mean("train/stale_token_fraction"),
        mean("train/trajectory_age_mean"),
    )


def error_of_mean(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def summary(runs: list[Run]) -> str:
    base = {run.seed: run.accuracy for run in runs if run.age == 0}
    rows = []
    for age in sorted({run.age for run in runs}):
        these = [run for run in runs if run.age == age]
        accuracy = [run.accuracy for run in these]
        gaps = [run.accuracy - base[run.seed] for run in these if age and run.seed in base]
        rows.append(
            [
                f"age {age}",
                len(these),
                f"{statistics.fmean(accuracy):.1%} ± {error_of_mean(accuracy):.1%}",
                f"{statistics.fmean(gaps):+.1%} ± {error_of_mean(gaps):.1%}" if gaps else "",
                statistics.fmean(run.reward for run in these),
                statistics.fmean(run.length for run in these),
                statistics.fmean(run.mean_age for run in these),
                f"{statistics.fmean(run.stale for run in these):.0%}",
            ]
        )
    header = ["", "seeds", "held-out accuracy", "minus age 0", "reward", "length", "mean age", "stale tokens"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("results/async_learning"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        folder = args.folder / f"seed-{seed}"
        prepare(folder, seed)
        runs += [run_at(folder, seed, age, args.steps) for age in args.ages]
        print(summary(runs), flush=True)
    write_json(args.out, {"machine": facts("cpu"), "runs": [run._asdict() for run in runs]})


if __name__ == "__main__":
    main()
