#!/usr/bin/env python3
"""Asynchronous sampling in rounds beside synchronous steps: tokens per second of the native engine, and the ratio.

    python bench/rounds.py --shape llama-8b --prompts 32 --samples 16 --mean 700 --longest 4096 --ages 1 2 \\
        --out rounds.json
    python bench/rounds.py --shape tiny --prompts 4 --samples 4 --mean 10 --longest 60 --ages 1   on a CPU, in a minute

Answers end by chance: so many of the vocabulary's tokens are stop tokens that random weights write `--mean` tokens on
average, with a geometric tail up to `--longest`. The KV cache is given up between steps, as for training. The first age
+ 1 steps of each row are not counted: there the rounds fill up. `--train-rate` (tokens per second of an update, from
`train.py` on the same machine) adds the time of training to a step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import facts, resolve_device, resolve_dtype
from shapes import FIRST_WORD, SHAPES, chosen_model, open_model
from tables import ratio, table, write_json

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.roles import Progress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.types import Completion, Sampling, Score, Task


class RandomPrompts:
    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length, self.position = vocab_size, length, 0

    def item(self, position: int) -> Task:
        chance = random.Random(position)
        ids = tuple(chance.randrange(FIRST_WORD, self.vocab_size) for _ in range(self.length))
        return Task(position, f"bench:{position}", "", ids)

    def take(self, count: int) -> list[Task]:
        self.position += count
        return [self.item(position) for position in range(self.position - count, self.position)]

    def state_dict(self) -> Mapping[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.position = int(str(state["position"]))


class NoReward:
    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        return [Score(0.0) for _ in completions]

    def close(self) -> None: ...


@dataclass(frozen=True)
class Measured:
    age: int
    seconds: float  # of a step's sampling
    generated: float  # tokens of a step
    trained: float  # tokens of a step
    mean_age: float
    stale: float  # share of the trained tokens


def measure(engine: NativeEngine, args: argparse.Namespace, age: int) -> Measured:
    stream = RandomPrompts(engine.vocab_size, args.prompt)
    position = StreamAndOpenGroups(stream)
    stops = random.Random(0).sample(range(FIRST_WORD, engine.vocab_size), max(1, round(engine.vocab_size / args.mean)))
    sampling = Sampling(args.longest, stop_token_ids=tuple(stops))
    fresh = FreshRollouts(stream, engine, NoReward(), args.samples, sampling, seed=1)
    source = RoundRollouts(fresh, engine, position, age, int(_in_flight(args, age) * args.prompts), max_steps=10**9)
    rows: list[tuple[float, float, float, float, float]] = []
    for step in range(1, args.steps + age + 2):
        engine.release()
        _wait(engine)
        start = time.perf_counter()
        taken = source.take(args.prompts, step)
        _wait(engine)
        seconds = time.perf_counter() - start
        trained = sum(len(rollout.completion.token_ids) for group in taken.groups for rollout in group.rollouts)
        metrics = taken.metrics
        generated = metrics["num_generated_tokens"]
        print(
            f"age {age}, step {step}: {seconds:.2f} s, {generated / seconds:,.0f} tok/s, {trained:,} trained",
            flush=True,
        )
        if step > age + 1:
            rows.append((seconds, generated, trained, metrics["trajectory_age_mean"], metrics["stale_token_fraction"]))
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return Measured(age, *means)


def _in_flight(args: argparse.Namespace, age: int) -> float:
    return min(args.in_flight or 1 + age / 2, age + 1)


def _wait(engine: NativeEngine) -> None:
    if engine.forward.device.type == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--prompts", type=int, default=32, help="groups of a step (default 32)")
    parser.add_argument("--samples", type=int, default=16, help="answers of a group (default 16)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--mean", type=int, default=700, help="mean length of an answer (default 700)")
    parser.add_argument("--longest", type=int, default=4096, help="longest answer (default 4096)")
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2], help="max_trajectory_age_steps (default 1 2)")
    parser.add_argument(
        "--in-flight", type=float, help="groups sampled at once by groups of a step (default 1 + age/2)"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each (default 3)")
    parser.add_argument("--max-batch-size", type=int, default=512, help="answers decoded together (default 512)")
    parser.add_argument("--train-rate", type=float, help="tokens per second of training, for the whole step")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = resolve_device(args.device)
    model, tokenizer = open_model(
        chosen_model(args.shape, args.model), device, resolve_dtype(args.dtype, device), seed=0
    )
    tokenizer.decode = lambda *_, **__: ""
    settings = NativeSettings(max_batch_size=args.max_batch_size, max_total_tokens=args.prompt + args.longest)
    engine = NativeEngine(model, tokenizer, settings)
    results = [measure(engine, args, age) for age in (0, *args.ages)]
    base = results[0]
    rows: list[list[Any]] = []
    for found in results:
        rate, base_rate = found.trained / found.seconds, base.trained / base.seconds
        row = [found.age, f"{found.seconds:.2f}", f"{rate:,.0f}", ratio(rate, base_rate)]
        row += [f"{found.mean_age:.2f}", f"{found.stale:.1%}"]
        if args.train_rate:
            whole, base_whole = (one.seconds + one.trained / args.train_rate for one in (found, base))
            row.append(ratio(found.trained / whole, base.trained / base_whole))
        rows.append(row)
    columns = ["age", "seconds", "trained tokens/s of sampling", "to age 0", "mean age", "stale tokens"]
    print(table([*columns, *(["whole step to age 0"] if args.train_rate else [])], rows))
    if args.out:
        write_json(args.out, {"facts": facts(device), "results": [vars(one) for one in results], "args": _plain(args)})


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


if __name__ == "__main__":
    main()
