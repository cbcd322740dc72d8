#!/usr/bin/env python3
"""The same GRPO job and the same DPO job with TRL and with posttrain, on a CPU, side by side.

    python bench/cpu_vs_trl.py                     both jobs, both sides: some eight minutes on two cores
    python bench/cpu_vs_trl.py --only dpo --json dpo.json
    python bench/cpu_vs_trl.py --only grpo --prompt-tokens 256  long prompts, which posttrain computes once for a group
    python bench/cpu_vs_trl.py --tiny              a random model of two layers: does it all run?

Each side runs in a process of its own, one after the other, on the same weights and the same tokens. See README.md
here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from machine import facts
from side_by_side.comparison import SideFailedError, check_same_work, remarks, run_side, summary, table
from side_by_side.job import (
    DPO,
    GRPO,
    POSTTRAIN,
    TRL,
    Job,
    long_prompt_rows,
    pair_rows,
    prompt_length,
    prompt_rows,
)
from side_by_side.models import SMOLLM2, SMOLLM2_SHAPE, TINY_SHAPE, fetched_model, random_model

from posttrain.errors import InputError
from posttrain.models.catalogue import DownloadError

# How much faster posttrain's step is to be, and how much of TRL's memory it may take. Nothing is asked of a tiny job.
GOALS = {GRPO: (1.6, 0.5), DPO: (1.3, 0.5)}
LONG_PROMPT_GOALS = (3.0, 0.5)  # of GRPO with prompts of 256 tokens or more
REPOSITORY = Path(__file__).resolve().parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[GRPO, DPO], help="one of the two jobs")
    parser.add_argument("--side", choices=[TRL, POSTTRAIN], help="one of the two sides; no ratios then")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps; the first one is a warm-up (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default 2)")
    parser.add_argument("--model", type=Path, default=REPOSITORY / SMOLLM2.folder, help="folder of the model")
    parser.add_argument("--random-weights", action="store_true", help="random weights of SmolLM2's shape: no download")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and a tiny job")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="of every GRPO prompt (default: some forty)")
    parser.add_argument("--grpo-tokens", type=int, help="posttrain's micro-batch in the GRPO job, in tokens")
    parser.add_argument("--dpo-tokens", type=int, help="posttrain's micro-batch in the DPO job, in tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    args = parser.parse_args()
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if args.prompt_tokens and args.prompt_tokens < 16:
        parser.error("--prompt-tokens must be at least 16: the chat template takes some of them")
    return args


def prepare_model(args: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    """The folder of the model, and what to call it."""
    if args.tiny:
        return random_model(scratch / "model", TINY_SHAPE), "a tiny random Llama"
    if args.random_weights:
        return random_model(scratch / "model", SMOLLM2_SHAPE, args.model), "random weights of SmolLM2-135M's shape"
    return fetched_model(args.model), SMOLLM2.title if args.model.name == Path(SMOLLM2.folder).name else str(args.model)


def prepare_jobs(args: argparse.Namespace, model: Path) -> list[Job]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    job = Job(GRPO, str(model), args.steps, args.threads)
    if args.tiny:
        job = replace(job, num_prompts=2, num_samples=4, num_new_tokens=8, num_pairs=2, num_sequence_tokens=32)
    long = args.prompt_tokens
    rows = long_prompt_rows(tokenizer, job.num_prompts, long) if long else prompt_rows(job.num_prompts)
    # A long prompt that is computed twice costs more than the activations of half a group are worth.
    budget = long + job.num_samples * job.num_new_tokens if long else _tokens_of_half_a_group(tokenizer, job, rows)
    grpo = replace(
        job,
        rows=rows,
        num_prompt_tokens=long,
        trl_micro_batch=min(16, job.num_prompts * job.num_samples),
        posttrain_micro_batch_tokens=args.grpo_tokens or budget,
    )
    dpo = replace(
        job,
        kind=DPO,
        rows=pair_rows(tokenizer, job.num_pairs, job.num_sequence_tokens),
        trl_micro_batch=min(8, job.num_pairs),
        posttrain_micro_batch_tokens=args.dpo_tokens or 2 * job.num_sequence_tokens,  # the least that is accepted
    )
    jobs = [job for job in (grpo, dpo) if args.only in (None, job.kind)]
    if args.tiny:
        return jobs
    goals = {**GOALS, GRPO: LONG_PROMPT_GOALS} if long >= 256 else GOALS
    return [replace(job, goal_speed=goals[job.kind][0], goal_memory=goals[job.kind][1]) for job in jobs]


def _tokens_of_half_a_group(tokenizer: Any, job: Job, rows: list[dict[str, str]]) -> int:
    """Half the answers of a group and their prompt. The prompt is then trained twice, which costs little time and
    saves the activations of the other half."""
    longest = max(prompt_length(tokenizer, row) for row in rows)
    return longest + job.num_samples // 2 * job.num_new_tokens


def main() -> int:
    args = arguments()
    report: dict[str, Any] = {**facts("cpu"), "machine": f"{platform.machine()}, {os.cpu_count()} cores", "jobs": {}}
    trouble: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cpu-vs-trl-") as scratch:
        model, title = prepare_model(args, Path(scratch))
        report["model"] = title
        for job in prepare_jobs(args, model):
            outcomes = {}
            for side in [args.side] if args.side else [TRL, POSTTRAIN]:
                load = os.getloadavg()[0]
                print(f"{job.kind.upper()} with {side} … (load {load:.2f})", file=sys.stderr, flush=True)
                outcomes[side] = run_side(job, side, Path(scratch))
            print(f"\n{table(job, outcomes, title)}")
            print("\n".join(f"- {remark}" for remark in remarks(job.kind, outcomes)), flush=True)
            report["jobs"][job.kind] = summary(job, outcomes)
            if len(outcomes) == 2:
                trouble += check_same_work(outcomes)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    for line in trouble:
        print(f"not the same job: {line}", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running side ends too
    try:
        sys.exit(main())
    except (InputError, DownloadError, SideFailedError) as error:
        sys.exit(f"cpu_vs_trl: {error}")
