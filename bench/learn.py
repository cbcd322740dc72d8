#!/usr/bin/env python3
"""What a GRPO run learns in so many minutes, beside TRL: the same start, prompts, reward, batch and time.

    python bench/learn.py train posttrain --model SFT --train train.jsonl.gz --minutes 4 --out runs/posttrain-1e-5
    python bench/learn.py train trl --model SFT --train train.jsonl.gz --minutes 4 --vllm --out runs/trl-1e-5
    python bench/learn.py evaluate runs/* --test test.jsonl --problems 400
    python bench/learn.py report runs/* --svg curve.svg
    python bench/learn.py train posttrain … --recipe dynamic --set policy.generation.temperature=1.2   posttrain alone
    python bench/learn.py compare --out runs --test test.jsonl --seeds 0 1 2 --lr 5e-6 1e-5 2e-5 --vllm \\
        --trl-python .trl-vllm/bin/python -- --model SFT --train train.jsonl.gz --minutes 6

`train` runs one side for its minutes and keeps the weights at `--marks` equally distant times; writing them does not
count, nor does loading. `evaluate` samples held-out problems from each of them (avg@k at T = 0.6, an interval by
bootstrap over problems), with posttrain's engine for both sides. Both write `curve.json` in the run's folder, so every
call can be made on its own, minutes each. `report` prints accuracy over time and over generated tokens, and the gain
per minute of each side's best run; of several seeds also the mean of their last pass@1 (avg@k) and pass@k with
Student's 95 % interval, for each side and rate, and which rate is each side's best. `compare` does all of it: every
side, rate and seed in a process of its own, without those that `--out` has already, then `evaluate` and `report`.

Rows of the data have `question` and `final_answer`; the reward is `problems.py`'s. TRL runs by its defaults
(transformers' generate, fp32 weights under bf16 autocast) with what the job fixes: batch, temperature, longest answer,
constant learning rate, no KL. With `--vllm` it samples with vLLM, colocated on the same GPU; `--trl-python` names the
Python of an environment that has TRL and vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import problems
from learn_sides import RECIPES, SIDES
from machine import facts, resolve_device, resolve_dtype
from problems import read_problems
from tables import Cell, table, write_json

CURVE = "curve.json"
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's, from one degree of freedom on


# -- evaluation --------------------------------------------------------------------------------------------------------


def accuracy(weights: str, rows: Sequence[dict[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    """avg@k of the model in `weights`, with an interval, and what its answers look like."""
    from shapes import open_model

    from posttrain.apps.evaluate.metrics import bootstrap_interval
    from posttrain.engines.native import NativeEngine, NativeSettings
    from posttrain.types import NoiseKey, Sampling, Task

    device = resolve_device(args.device)
    model, tokenizer = open_model(weights, device, resolve_dtype("auto", device))
    tasks = []
    for draw, row in enumerate(rows):
        message = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        tasks.append(Task(draw, f"held-out:{draw}", "", tuple(ids)))
    longest = max(len(task.prompt_ids) for task in tasks) + args.new_tokens
    engine = NativeEngine(model, tokenizer, NativeSettings(max_batch_size=512, max_total_tokens=longest))
    groups = engine.generate(tasks, args.samples, Sampling(args.new_tokens, temperature=0.6), NoiseKey(args.seed, 0))
    right = [
        [problems.right_answer("", answer.text, row["final_answer"]) for answer in group]
        for row, group in zip(rows, groups, strict=True)
    ]
    means = [sum(values) / len(values) for values in right]
    interval = bootstrap_interval(means, seed=0, confidence=0.95, resamples=10_000)
    answers = [answer for group in groups for answer in group]
    engine.release()
    return {
        "accuracy": sum(means) / len(means),
        "interval": [interval.low, interval.high] if interval is not None else None,
        f"pass@{args.samples}": sum(max(values) for values in right) / len(right),
        "length": sum(len(answer.token_ids) for answer in answers) / len(answers),
        "cut_off": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        "problems": len(rows),
    }


def evaluate(args: argparse.Namespace) -> int:
    rows = read_problems(args.test)
    random.Random(0).shuffle(rows)
    rows = rows[: args.problems]
    for folder in args.runs:
        path = folder / CURVE
        found = json.loads(path.read_text())
        wanted = found["curve"][-1:] if args.last_only else found["curve"]
        for point in wanted:
            if "accuracy" not in point:
                point |= accuracy(str(Path(point["weights"]) / "policy/weights/model"), rows, args)
                path.write_text(json.dumps(found, indent=1))  # each takes half a minute
                print(f"{folder.name}, {point['seconds']:.0f} s: {_shown(point)}", flush=True)
        if args.start is not None and "start" not in found:
            found["start"] = accuracy(str(args.start), rows, args)
            args.start = None  # once: it is the same for all
            print(f"before training: {_shown(found['start'])}", flush=True)
        path.write_text(json.dumps(found, indent=1))
    return 0


# -- report ------------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> int:
    runs = {folder.name: json.loads((folder / CURVE).read_text()) for folder in args.runs}
    start = next((run["start"] for run in runs.values() if "start" in run), None)
    rows = []
    best: dict[str, tuple[float, str]] = {}  # side -> gain per minute, run
    for name, run in runs.items():
        for point in run["curve"]:
            if "accuracy" in point:
                rows.append([
                    name, f"{point['seconds'] / 60:.1f}", f"{point['step']}", f"{point['tokens'] / 1e6:.2f}",
                    f"{point['reward']:.3f}", _shown(point), f"{point['length']:.0f}", f"{point['cut_off']:.1%}",
                ])  # fmt: skip
        last = run["curve"][-1] if run["curve"] else {}
        if start is not None and "accuracy" in last:
            gain = 100 * (last["accuracy"] - start["accuracy"]) / (last["seconds"] / 60)
            best[run["side"]] = max(best.get(run["side"], (gain, name)), (gain, name))
    if start is not None:
        rows.insert(
            0, ["before", "0.0", "0", "0.00", "", _shown(start), f"{start['length']:.0f}", f"{start['cut_off']:.1%}"]
        )
    columns = ["run", "minutes", "steps", "M tokens", "reward", "accuracy", "length", "cut off"]
    print(table(columns, rows))
    if len({run["seed"] for run in runs.values() if "seed" in run}) > 1:
        print(table(["side", "lr", "seeds", "pass@1", "pass@k", ""], over_seeds(runs.values())))
    for side, (gain, name) in sorted(best.items()):
        print(f"{side}: {gain:+.2f} points a minute at best ({name})")
    if {"posttrain", "trl"} <= best.keys() and best["trl"][0] > 0:
        print(f"ratio of the gains: {best['posttrain'][0] / best['trl'][0]:.2f} (goal 2)")
    write_json(args.json, {"benchmark": "learn", "runs": runs})
    if args.svg is not None and start is not None:
        from learn_chart import accuracy_over_time

        args.svg.write_text(accuracy_over_time(runs, start))
    return 0


def over_seeds(runs: Iterable[dict[str, Any]]) -> list[list[Cell]]:
    """For each side and rate the means of the last weights of its seeds, the best rate of each side first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if run["curve"] and "accuracy" in run["curve"][-1]:
            lr = " ".join([f"{run['lr']:g}", *(word for word in run["recipe"] if word != "plain")])
            sampler = ", vLLM" if run.get("vllm") else ""
            groups.setdefault((run["side"] + sampler, lr), []).append(run["curve"][-1])
    best = {side: max(_mean(last) for (one, _), last in groups.items() if one == side) for side, _ in groups}
    rows: list[list[Cell]] = []
    for (side, lr), last in sorted(groups.items(), key=lambda group: (group[0][0], -_mean(group[1]))):
        passes = sorted({key for point in last for key in point if key.startswith("pass@")})
        many = [f"{key} {with_interval([point[key] for point in last if key in point])}" for key in passes]
        mark = "best rate" if _mean(last) == best[side] else ""
        mean = with_interval([point["accuracy"] for point in last])
        rows.append([side, lr, len(last), mean, ", ".join(many), mark])
    return rows


def _mean(points: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(point["accuracy"] for point in points)


def with_interval(values: Sequence[float]) -> str:
    """The mean over seeds, with Student's 95 % interval if there are two to ten of them."""
    mean = statistics.fmean(values)
    if not 2 <= len(values) <= len(T_975) + 1:
        return f"{mean:.2%}"
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.2%} [{mean - half:.2%}, {mean + half:.2%}]"


def _shown(point: dict[str, Any]) -> str:
    low, high = point["interval"] or (float("nan"), float("nan"))
    return f"{point['accuracy']:.2%} [{low:.2%}, {high:.2%}]"


# -- commands ----------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    args.device = resolve_device(args.device)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    rows = [row for row in read_problems(args.train) if len(row["question"]) < 3 * args.longest_prompt]
    random.Random(args.seed).shuffle(rows)
    watch, version = SIDES[args.side](args, rows)
    found = {
        **facts(args.device), "side": args.side, "version": version, "lr": args.lr,
        "seed": args.seed, "vllm": args.vllm, "recipe": [args.recipe, *args.set],
        "minutes": args.minutes, "batch": [args.prompts, args.samples], "rewards": watch.rewards, "curve": watch.curve,
    }  # fmt: skip
    (args.out / CURVE).write_text(json.dumps(found, indent=1))
    first, last = watch.rewards[:5], watch.rewards[-5:]
    print(
        f"{args.side}, lr {args.lr:g}, {args.recipe}: {watch.num_steps} steps and {watch.num_tokens:,} generated "
        "tokens in "
        f"{watch.seconds:.0f} s; mean reward of the first five steps {sum(first) / max(1, len(first)):.3f}, of the "
        "last five "
        f"{sum(last) / max(1, len(last)):.3f}"
    )
    return 0


def compare(args: argparse.Namespace) -> int:
    """Every side, rate and seed, then `evaluate` and `report`. What has a curve is not trained again."""
    model = arguments(["train", "posttrain", "--out", "-", *args.training]).model  # also: are these arguments right?
    folders = []
    for seed in args.seeds:
        for side in args.sides:
            for lr in args.lr:
                folder = args.out / f"{side}-{lr:g}-seed{seed}"
                folders.append(folder)
                if (folder / CURVE).exists():
                    continue
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
                python = args.trl_python if side == "trl" else sys.executable
                words = [python, __file__, "train", side, *args.training, "--lr", str(lr), "--seed", str(seed)]
                words += ["--vllm"] * (args.vllm and side == "trl")
                subprocess.run([*words, "--out", str(folder)], check=True)
    runs = [str(folder) for folder in folders]
    held_out = ["--problems", str(args.problems), "--samples", str(args.samples), "--new-tokens", str(args.new_tokens)]
    device = ["--device", args.device]
    main(["evaluate", *runs, "--test", str(args.test), "--start", str(model), *held_out, *device])
    return main(["report", *runs, "--json", str(args.out / "learn.json"), "--svg", str(args.out / "learn.svg")])


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("train", help="one side, for so many minutes")
    one.set_defaults(run=train)
    one.add_argument("side", choices=SIDES)
    one.add_argument("--model", type=Path, required=True, help="folder of the weights that both sides start from")
    one.add_argument("--train", type=Path, required=True, help="JSON lines with question and final_answer, .gz or not")
    one.add_argument("--out", type=Path, required=True, help="a new folder")
    one.add_argument("--minutes", type=float, default=4.0)
    one.add_argument("--marks", type=int, default=2, help="times at which weights are kept (default 2)")
    one.add_argument("--lr", type=float, default=1e-5)
    one.add_argument("--prompts", type=int, default=64, help="of a step")
    one.add_argument("--samples", type=int, default=8, help="answers to each")
    one.add_argument("--new-tokens", type=int, default=200, help="longest answer")
    one.add_argument("--longest-prompt", type=int, default=312, help="tokens; longer questions are left out")
    one.add_argument("--micro-batch", type=int, default=64, help="answers in one pass")
    one.add_argument("--temperature", type=float, default=1.0)
    one.add_argument("--recipe", choices=RECIPES, default="plain", help="changes of posttrain's settings, by name")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more change")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    one.add_argument("--vllm", action="store_true", help="TRL samples with vLLM, colocated")
    one.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU's memory for vLLM")
    held_out = commands.add_parser("evaluate", help="accuracy of the weights that runs have kept")
    held_out.set_defaults(run=evaluate)
    held_out.add_argument("runs", type=Path, nargs="+", help="folders that `train` wrote")
    held_out.add_argument("--test", type=Path, required=True)
    held_out.add_argument("--start", type=Path, help="also the weights that they started from")
    held_out.add_argument("--problems", type=int, default=400)
    held_out.add_argument("--samples", type=int, default=16)
    held_out.add_argument("--new-tokens", type=int, default=320)
    held_out.add_argument("--last-only", action="store_true", help="only the last weights of each run")
    held_out.add_argument("--seed", type=int, default=0)
    held_out.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    shown = commands.add_parser("report", help="accuracy over time and tokens, and the gain per minute")
    shown.set_defaults(run=report)
    shown.add_argument("runs", type=Path, nargs="+")
    shown.add_argument("--json", type=Path, metavar="FILE", help="also write all curves to this file")
    shown.add_argument("--svg", type=Path, metavar="FILE", help="also draw them; needs the accuracy of the start")
    both = commands.add_parser("compare", help="both sides, several rates and seeds, evaluated and reported")
    both.set_defaults(run=compare)
    both.add_argument("--out", type=Path, required=True, help="a folder; runs that it has are not trained again")
    both.add_argument("--test", type=Path, required=True)
    both.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    both.add_argument("--lr", type=float, nargs="+", default=[5e-6, 1e-5, 2e-5])
    both.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    both.add_argument("--trl-python", default=sys.executable, help="the Python of an environment with TRL")
    both.add_argument("--vllm", action="store_true", help="TRL samples with vLLM, colocated")
    both.add_argument("--problems", type=int, default=400)
    both.add_argument("--samples", type=int, default=16)
    both.add_argument("--new-tokens", type=int, default=320)
    both.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the evaluation")
    both.add_argument("training", nargs="+", metavar="-- ARGUMENT", help="arguments of `train` for every run")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
