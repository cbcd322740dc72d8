#!/usr/bin/env python3
"""Training and log-probabilities of one GPU: tokens per second, share of the matrix roof, peak memory; beside others.

    python bench/train.py --shape llama-8b --out train.json                       posttrain alone
    python bench/train.py --shape llama-8b --against stock --profile
    python bench/train.py --shape llama-8b --fp8                                  with policy.fp8, beside bf16
    python bench/train.py --shape llama-1.5b --against stock trl --shortest 100   lengths between 100 and 900
    python bench/train.py --shape tiny --against stock trl  on a CPU, in a minute: does it all run?

One optimizer step over `--sequences` sequences of `--tokens` tokens in micro-batches of `--micro-tokens`, through the
policy that every algorithm uses. `--set` changes any setting of the run, as on posttrain's own command line. See
README.md here.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from machine import dtype_name, facts, matrix_roof, resolve_device, resolve_dtype
from shapes import SHAPES, chosen_model
from side_process import Result, run_side, serve_side, show_failures
from tables import ratio, table, write_json
from train_job import FP8, POSTTRAIN, STOCK, TRL, TrainJob
from train_sides import measure

from posttrain.errors import InputError

TITLES = {
    POSTTRAIN: "posttrain, packed",
    FP8: "posttrain, packed, FP8",
    STOCK: "transformers, sdpa, padded",
    TRL: "TRL SFTTrainer, padded",
}
OURS = (POSTTRAIN, FP8)
SAME_LOSS = 2e-2  # bf16 sums in another order; a different job differs by far more


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--against", nargs="*", choices=[STOCK, TRL], default=[], help="peers to run beside posttrain")
    parser.add_argument("--fp8", action="store_true", help="posttrain once more, with policy.fp8")
    parser.add_argument("--sequences", type=int, help="of an optimizer step (default 36: four micro-batches)")
    parser.add_argument("--tokens", type=int, help="of a sequence, or of the longest (default 900)")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest sequence (default: all are equally long)")
    parser.add_argument("--micro-tokens", type=int, help="tokens of a training micro-batch (default 8192)")
    parser.add_argument("--logprob-tokens", type=int, help="tokens of a micro-batch without gradients (default 16384)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps; the best counts (default 2)")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 8 instead of all weights")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--logprobs-only", action="store_true", help="no optimizer step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of posttrain's run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--profile", action="store_true", help="also the ten largest costs of posttrain's step")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one side, in its own process
    args = parser.parse_args(words)
    is_tiny = args.shape == "tiny" and args.model is None
    for name, usual, tiny in (
        ("sequences", 36, 6),
        ("tokens", 900, 20),
        ("micro_tokens", 8192, 64),
        ("logprob_tokens", 16384, 128),
    ):
        if getattr(args, name) is None:
            setattr(args, name, tiny if is_tiny else usual)
    args.shortest = args.shortest or args.tokens
    if args.steps < 1 or not 2 <= args.shortest <= args.tokens:
        parser.error("--steps is at least 1, --shortest at least 2 and at most --tokens")
    return args


def job_of(args: argparse.Namespace, side: str) -> TrainJob:
    device = resolve_device(args.device)
    return TrainJob(
        side=side,
        model=chosen_model(args.shape, args.model),
        device=device,
        dtype=dtype_name(resolve_dtype(args.dtype, device)),
        num_sequences=args.sequences,
        sequence_tokens=args.tokens,
        shortest_tokens=args.shortest,
        micro_batch_tokens=args.micro_tokens,
        logprob_tokens=args.logprob_tokens,
        steps=args.steps,
        lora=args.lora,
        checkpointing=args.checkpointing,
        logprobs_only=args.logprobs_only,
        profile=args.profile and side in OURS,
        overrides=(*args.set, *(["policy.fp8=true"] if side == FP8 else [])) if side in OURS else (),
    )


def do_job(job: dict[str, Any]) -> Result:
    train_job = TrainJob(**{**job, "overrides": tuple(job["overrides"])})
    # In the process that is measured, before it needs its memory: the clocks of a GPU depend on its temperature.
    roof = {"matrix_roof_flops": matrix_roof(train_job.device)} if train_job.side == POSTTRAIN else {}
    return {**measure(train_job), **roof}


def show(results: dict[str, Result], roof: float | None) -> str:
    """Two tables in one: training, then log-probabilities."""
    rows = []
    for what, rate, flops, peak in (
        ("training", "train_tokens_per_s", "train_flops", "peak_gib"),
        ("log-probabilities", "logprobs_tokens_per_s", "logprobs_flops", "logprobs_peak_gib"),
    ):
        ours = results[POSTTRAIN].get(rate)
        for side, result in results.items():
            if "error" not in result and result.get(rate) is None:
                continue
            share = f"{result[flops] / roof:.0%}" if roof and flops in result else None
            speed = result.get(rate, "failed")
            tflops = result[flops] / 1e12 if flops in result else None
            faster = "" if side in OURS else ratio(ours, result.get(rate))
            rows.append([f"{what}: {TITLES[side]}", speed, tflops, share, result.get(peak), faster])
    return table(["", "tokens/s", "TFLOP/s", "of the roof", "peak GiB", "posttrain is"], rows)


def fp8_gain(results: dict[str, Result]) -> dict[str, float]:
    """Tokens per second in FP8, in parts of those in bf16."""
    rates = {"training": "train_tokens_per_s", "log-probabilities": "logprobs_tokens_per_s"}
    plain, fp8 = (results.get(side, {}) for side in OURS)
    return {what: fp8[rate] / plain[rate] for what, rate in rates.items() if fp8.get(rate) and plain.get(rate)}


def same_losses(results: dict[str, Result]) -> list[str]:
    """Sides whose first loss is not posttrain's."""
    losses = {side: result["loss"] for side, result in results.items() if result.get("loss") is not None}
    ours = losses.get(POSTTRAIN)
    if ours is None:
        return []
    return [side for side, loss in losses.items() if abs(loss - ours) > SAME_LOSS * abs(ours)]


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.job:
        return serve_side(args.job, do_job)
    device = resolve_device(args.device)
    job = job_of(args, POSTTRAIN)
    lengths = f"{args.tokens}" if args.shortest == args.tokens else f"{args.shortest} to {args.tokens}"
    print(
        f"{job.model}, {'LoRA' if args.lora else 'all weights'}, {job.dtype}: {args.sequences} sequences of {lengths} "
        "tokens, "
        f"micro-batches of {args.micro_tokens}",
        flush=True,
    )
    results: dict[str, Result] = {}
    for side in [POSTTRAIN, *([FP8] if args.fp8 else []), *args.against]:
        print(f"{TITLES[side]} …", file=sys.stderr, flush=True)
        results[side] = run_side(__file__, job_of(args, side).as_json())
    roof = next((result["matrix_roof_flops"] for result in results.values() if "matrix_roof_flops" in result), None)
    print(f"\n{show(results, roof)}")
    if roof:
        print(f"the roof: a product of square matrices at {roof / 1e12:.1f} TFLOP/s")
    for side in OURS:
        if text := results.get(side, {}).pop("profile_text", None):
            print(f"\n{TITLES[side]}\n{text}")
    if gain := fp8_gain(results):
        print("FP8 is " + ", ".join(f"{value:.2f}x bf16 in {what}" for what, value in gain.items()))
    show_failures(results)
    different = same_losses(results)
    for side in different:
        print(
            f"not the same job: the loss of {TITLES[side]} is {results[side]['loss']}, ours "
            f"{results[POSTTRAIN]['loss']}"
        )
    rates = {side: result["train_tokens_per_s"] for side, result in results.items() if "train_tokens_per_s" in result}
    ratios = {side: rates[POSTTRAIN] / rate for side, rate in rates.items() if side not in OURS and POSTTRAIN in rates}
    report = {**facts(device), "benchmark": "train", "job": job.as_json(), "matrix_roof_flops": roof}
    write_json(args.out, {**report, "sides": results, "ratios": ratios, "fp8_over_bf16": gain})
    return 1 if any("error" in results.get(side, {}) for side in OURS) or different else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"train: {error}")
