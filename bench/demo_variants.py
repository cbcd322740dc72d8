#!/usr/bin/env python3
"""Variants of GRPO on the demo's additions, from the same taught model on a CPU.

    python bench/demo_variants.py curves --folder runs/demo --out curves.svg     GRPO, PPO and distillation
    python bench/demo_variants.py deviations --folder runs/demo                  the group's deviation, or the others'

`curves`: accuracy on additions that were not trained, over steps. The teacher of the distillation is the end of GRPO's
run. `deviations`: a graded reward, exp(-|error| / 10), in groups of four, five seeds each: the mean reward of the last
steps and of all, the median of a step's largest advantage, the largest advantage, the median gradient norm. Runs that
are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import table

from posttrain.apps.demo.arithmetic import build_model, write_data
from posttrain.apps.demo.show import grpo_overrides, sft_overrides
from posttrain.reporting import charts
from posttrain.reporting.charts import Axis, Frame, path_of, picture

SEEDS = range(5)
LAST = 5  # steps
COLOURS = {"GRPO": "#2563c9", "PPO": "#d9730d", "distillation": "#1a7f4b"}
T_975 = 2.776  # of Student's distribution with four degrees of freedom
REWARD = """import math


def graded(completion, reference):
    digits = "".join(c for c in completion.rpartition("{")[2] if c.isdigit())
    return math.exp(-abs(int(digits) - int(reference)) / 10) if digits else 0.0
"""


def run(kind: str, folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a run in `folder`, made now unless it is there."""
    if not (folder / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "posttrain.cli.main", kind, *words, f"checkpointing.checkpoint_dir={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def taught(folder: Path) -> None:
    if not (folder / "model").exists():
        write_data(folder / "data", 0)
        build_model(folder / "model", 0)
    run("sft", folder / "taught", sft_overrides(folder, 0))


def curves(folder: Path, steps: int, out: Path) -> None:
    taught(folder)
    common = [*grpo_overrides(folder, 0, steps), "grpo.val_period=5", "checkpointing.save_period=1000000"]
    teacher = folder / "grpo" / f"step_{steps}" / "policy" / "weights" / "model"
    critic = ["value.optimizer.kwargs.lr=2e-3", "grpo.policy_training_start_step=4"]
    found = {"GRPO": run("grpo", folder / "grpo", common)}
    found["PPO"] = run("ppo", folder / "ppo", [*common, *critic])
    found["distillation"] = run("distill", folder / "distill", [*common, f"teacher.model_name={teacher}"])
    accuracy = {
        name: [(row["step"], 100 * row["validation/accuracy"]) for row in rows if "validation/accuracy" in row]
        for name, rows in found.items()
    }
    for name, points in accuracy.items():
        print(name, " ".join(f"{step}: {value:.1f}" for step, value in points))
    out.write_text(drawn(accuracy))


def drawn(accuracy: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    width, height = size = (820, 380)
    last = max(step for points in accuracy.values() for step, _ in points)
    low, high = charts.value_range([0.0, *(value for points in accuracy.values() for _, value in points)])
    frame = Frame(width, height, Axis(0, last * 1.02, 64, width - 130), Axis(low, high, height - 48, 60))
    body = [frame.grid(num_x=9, num_y=6, whole=True)]
    free = float(height)  # labels from the lowest curve to the highest, at least a line apart
    for name, points in sorted(accuracy.items(), key=lambda item: item[1][-1][1]):
        steps, values = zip(*points, strict=True)
        stroke = f'style="stroke: {COLOURS[name]}"'
        body.append(f'<path class="line" {stroke} d="{path_of(frame.pixels(steps, values))}"/>')
        free = min(frame.y(values[-1]) + 4, free - 14)
        body.append(f'<text class="key" x="{frame.x(steps[-1]) + 8}" y="{free}">{name}</text>')
    middle = (frame.x.pixel_low + frame.x.pixel_high) / 2
    body.append(f'<text class="tick" x="{middle}" y="{height - 10}" text-anchor="middle">steps</text>')
    body.append('<text class="key" x="20" y="50">additions that were not trained, % right</text>')
    return str(picture("GRPO, PPO and distillation on the demo", size, "".join(body)))


def deviations(folder: Path, steps: int) -> None:
    taught(folder)
    (folder / "graded.py").write_text(REWARD)
    rows = []
    for over in ("group", "others"):
        found = []
        for seed in SEEDS:
            words = [
                *grpo_overrides(folder, seed, steps),
                f"grpo.adv_estimator.std_over={over}",
                "grpo.use_leave_one_out_baseline=true",
                "grpo.num_prompts_per_step=32",
                "grpo.num_generations_per_prompt=4",
                "policy.train_global_batch_size=128",
                "grpo.val_at_start=false",
                "grpo.val_at_end=false",
                "grpo.val_period=0",
                "checkpointing.metric_name=null",
                "checkpointing.save_period=1000000",
                f"reward={folder / 'graded.py'}:graded",
            ]
            found.append([r for r in run("grpo", folder / f"{over}_{seed}", words) if "train/reward" in r])
        ends = [statistics.fmean(r["train/reward"] for r in run_rows[-LAST:]) for run_rows in found]
        rows.append(
            [
                over,
                interval(ends),
                interval([statistics.fmean(r["train/reward"] for r in run_rows) for run_rows in found]),
                span([statistics.median(r["train/advantage_max"] for r in run_rows) for run_rows in found]),
                ", ".join(f"{max(r['train/advantage_max'] for r in run_rows):.3g}" for run_rows in found),
                span([statistics.median(r["train/grad_norm"] for r in run_rows) for run_rows in found]),
            ]
        )
    columns = ["reward, last steps", "all steps", "median of a step's largest advantage", "largest advantage, by seed"]
    print(table(["std_over", *columns, "median gradient norm"], rows))


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def interval(values: Sequence[float]) -> str:
    half = T_975 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "deviations"])
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default 40)")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"), help="the picture of `curves`")
    args = parser.parse_args()
    if args.what == "curves":
        curves(args.folder, args.steps, args.out)
    else:
        deviations(args.folder, args.steps)
