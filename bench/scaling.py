#!/usr/bin/env python3
"""What the driver costs: everything in a GRPO step that is not the model, as a step has 10 and 100 times as many
samples.

    python bench/scaling.py --out scaling.json
    python bench/scaling.py --samples 64 --factors 1 10 --new-tokens 32     in seconds

The step is that of `algorithms/grpo.py` with a policy and a sampler that do nothing: credit, batches, packing, reports
and the run folder are real, and so is the scheduler of the native engine. Prints seconds per 1,000 samples, and whether
they stay the same.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from grpo_job import EvenTokens, RandomPrompts
from machine import facts
from tables import table, write_json

from posttrain.algorithms.grpo import Grpo, GrpoSettings
from posttrain.config import load_config
from posttrain.data.packing import MicroBatching
from posttrain.engines.native.scheduler import PromptGroup, Sample, Scheduler, pages_for
from posttrain.errors import InputError
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.sharded import ShardedTrainer, SharedWeights
from posttrain.orchestration.workers import LocalWorker
from posttrain.recipes.grpo import GrpoRecipe, build_credit, build_objective
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.recorder import RunRecorder
from posttrain.reporting.rows import TOTAL_STEP, Hardware, top_level_stages
from posttrain.roles import Progress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Completion, NoiseKey, Sampling, StepReport, Task, TokenBatch

LINEAR_UP_TO = 1.15  # the exponent of the growth; 2 would be quadratic
NOTABLE_SHARE = 0.05  # a stage below this may grow as it likes for now
_PAGE_SIZE, _BATCH = 16, 512


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256, help="of the smallest step (default 256)")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 10, 100], help="times as many (default 1 10 100)")
    parser.add_argument("--group", type=int, default=16, help="samples of each prompt (default 16)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--new-tokens", type=int, default=256, help="of the longest answer; the shortest has half of them"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts (default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    args = parser.parse_args(words)
    if (
        args.samples % args.group
        or args.samples < args.group
        or args.group < 2
        or args.new_tokens < 2
        or args.repeats < 1
    ):
        parser.error(
            "--samples is a multiple of --group, --group and --new-tokens are at least 2, --repeats at least 1"
        )
    return args


class NoModel:
    """A rank that answers at once."""

    def update(self, *args: Any) -> dict[str, float]:
        return {"loss": 0.0, "grad_norm": 1.0, "update_skipped": 0.0, "lr": 0.0}

    def end_step(self) -> None: ...

    def logprobs(self, parts: Sequence[TokenBatch | None]) -> list[torch.Tensor | None]:
        return [None if part is None else torch.zeros(len(part.columns["mask"])) for part in parts]

    reference_logprobs = logprobs


class NoSampler:
    """Hands out random answers that were made beforehand."""

    def __init__(self, num_new: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.answers = []
        for _ in range(64):
            ids = tuple(rng.randrange(3, 1000) for _ in range(rng.randint(num_new // 2, num_new)))
            self.answers.append(Completion(ids, (-1.0,) * len(ids), "an answer of no meaning", "length"))

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        return [
            [self.answers[(task.draw * num_samples + i) % len(self.answers)] for i in range(num_samples)]
            for task in tasks
        ]

    def release(self) -> None: ...


def build_step(args: argparse.Namespace, num_samples: int) -> Grpo:
    num_prompts = num_samples // args.group
    words = [
        "policy.model_name=none",
        f"grpo.num_prompts_per_step={num_prompts}",
        f"grpo.num_generations_per_prompt={args.group}",
        f"policy.train_global_batch_size={num_samples}",
        f"policy.max_total_sequence_length={args.prompt_tokens + args.new_tokens}",
        "loss_fn.reference_policy_kl_penalty=0.01",
    ]
    config: Any = load_config("grpo", None, words).config
    batching = MicroBatching(max_tokens=8192)
    policy = ShardedTrainer(LocalWorker(cast(Rank, NoModel())), train=batching, score=batching, seed=0)
    rollouts = FreshRollouts(
        RandomPrompts(args.prompt_tokens, 1000, seed=0),
        NoSampler(args.new_tokens),
        EvenTokens(),
        num_samples=args.group,
        sampling=Sampling(args.new_tokens),
        seed=0,
    )
    settings = GrpoSettings(config.grpo.num_prompts_per_step)
    return Grpo(settings, build_objective(config), build_credit(config), policy, rollouts, SharedWeights())


def scheduling_s(args: argparse.Namespace, num_samples: int) -> float:
    """The native engine's bookkeeping of pages and places, from the first token of the first sample to the last of the
    last.
    """
    rng = random.Random(0)
    groups = [
        PromptGroup(task, args.new_tokens)
        for task in RandomPrompts(args.prompt_tokens, 1000, 0).take(num_samples // args.group)
    ]
    samples = [Sample(group, index, noise_key=0) for group in groups for index in range(args.group)]
    lengths = {id(sample): rng.randint(args.new_tokens // 2, args.new_tokens) for sample in samples}
    pages = _BATCH * (pages_for(args.prompt_tokens + args.new_tokens, _PAGE_SIZE) + 2)
    start = time.perf_counter()
    scheduler = Scheduler(pages, _PAGE_SIZE, _BATCH)
    scheduler.add(samples)
    while scheduler.unfinished:
        admitted = scheduler.admit()
        for sample in admitted.samples:
            if not sample.token_ids:
                sample.token_ids.append(5)
        scheduler.reserve_step()
        for sample in list(scheduler.active):
            sample.token_ids.append(5)
            if len(sample.token_ids) >= lengths[id(sample)]:
                scheduler.leave(sample)
    return time.perf_counter() - start


def recording_s(report: StepReport, folder: Path) -> float:
    """What it takes to write a step to its run folder, samples included."""
    recorder = RunRecorder(
        folder,
        RecorderSettings(GrpoRecipe.presentation, max_steps=1, hardware=Hardware(1), config_yaml="", quiet=True),
        stream=io.StringIO(),
    )
    recorder.start(0)
    start = time.perf_counter()
    recorder.record_step(1, report, None)
    return time.perf_counter() - start


def once(args: argparse.Namespace, num_samples: int) -> dict[str, float]:
    """Seconds of each part of one step."""
    gc.collect()
    report = build_step(args, num_samples).step(1)
    stages = top_level_stages(report.timings_s)
    found = {"scheduling (native engine)": scheduling_s(args, num_samples), **stages}
    found["rest of the step"] = report.timings_s[TOTAL_STEP] - sum(stages.values())
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        found["recording"] = recording_s(report, Path(folder) / "run")
    return found


def measure(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Seconds of each part, by the number of samples; the best of the repeats, part by part."""
    found: dict[int, dict[str, float]] = {}
    for factor in sorted(set(args.factors)):
        count = args.samples * factor
        print(f"{count:,} samples …", file=sys.stderr, flush=True)
        runs = [once(args, count) for _ in range(args.repeats)]
        found[count] = {part: min(run[part] for run in runs) for part in runs[0]}
        found[count]["total"] = sum(found[count].values())
    return found


def exponents(found: dict[int, dict[str, float]]) -> dict[str, float]:
    """How each part grows between the last two sizes: seconds ~ samples ** exponent. Empty for a single size."""
    if len(found) < 2:
        return {}
    (n, before), (m, after) = list(found.items())[-2:]
    return {
        part: math.log(after[part] / before[part]) / math.log(m / n) for part in after if before[part] > 0 < after[part]
    }


def grows_too_fast(found: dict[int, dict[str, float]]) -> list[str]:
    """Notable parts that are not linear."""
    last = list(found.values())[-1]
    return [
        part
        for part, exponent in exponents(found).items()
        if exponent > LINEAR_UP_TO and last[part] >= NOTABLE_SHARE * last["total"]
    ]


def show(found: dict[int, dict[str, float]]) -> str:
    growth = exponents(found)
    rows: list[list[Any]] = []
    for part in next(iter(found.values())):
        per_thousand = [1000 * seconds[part] / count for count, seconds in found.items()]
        rows.append(
            [part, *(f"{value:.4f}" for value in per_thousand), f"{growth[part]:.2f}" if part in growth else None]
        )
    return table(["seconds per 1,000 samples", *(f"{count:,}" for count in found), "exponent"], rows)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    found = measure(args)
    print(
        f"\nsteps of {args.group} samples a prompt, {args.prompt_tokens} + up to {args.new_tokens} "
        f"tokens\n{show(found)}"
    )
    bad = grows_too_fast(found)
    first, last = next(iter(found.items())), list(found.items())[-1]
    ratio = (last[1]["total"] / last[0]) / (first[1]["total"] / first[0])
    if len(found) > 1:
        print(f"a sample costs {ratio:.2f} times as much in a step of {last[0]:,} as in one of {first[0]:,}")
    print("linear" if not bad else f"NOT linear: {', '.join(bad)}")
    report = {
        **facts("cpu"),
        "benchmark": "scaling",
        "job": {name: value for name, value in vars(args).items() if name != "out"},
        "seconds": found,
        "exponents": exponents(found),
        "ratios": {"cost_of_a_sample": ratio},
        "linear": not bad,
    }
    write_json(args.out, report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"scaling: {error}")
