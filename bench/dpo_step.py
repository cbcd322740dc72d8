#!/usr/bin/env python3
"""DPO on pairs with UltraFeedback's lengths, with posttrain (packed) and with TRL: pairs per second, memory, and the
ratio.

    python bench/dpo_step.py --shape llama-1.5b --out dpo.json
    python bench/dpo_step.py --shape qwen-1.5b --checkpointing \\
        --pairs-file data/preferences/ultrafeedback_train.jsonl.gz
    python bench/dpo_step.py --shape tiny              on a CPU, in a minute: does it all run?

Both sides train on the same random tokens in the same order from the same weights, one after the other in processes of
their own. For real data and accuracy see dpo_on_pairs.py. See README.md here.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from dpo_sides import POSTTRAIN, TRL, DpoJob, measure
from machine import dtype_name, facts, resolve_device, resolve_dtype
from pair_lengths import PairLengths, from_file, like_ultrafeedback
from shapes import SHAPES, chosen_model
from side_process import Result, run_side, serve_side, show_failures
from tables import ratio, table, write_json

from posttrain.errors import InputError

TITLES = {TRL: "TRL DPOTrainer", POSTTRAIN: "posttrain, packed"}
SAME_GRADIENT = 5e-2  # bf16 rounds differently on the two sides; other pairs differ by far more


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1.5b", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--sides", nargs="+", choices=[TRL, POSTTRAIN], default=[TRL, POSTTRAIN])
    parser.add_argument("--pairs", type=int, help="of an optimizer step (default 32)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first warms up (default 6)")
    parser.add_argument("--max-tokens", type=int, help="of a sequence; longer pairs are left out (default 1024)")
    parser.add_argument("--micro-tokens", type=int, help="of posttrain's micro-batch (default 16384)")
    parser.add_argument("--micro-pairs", type=int, help="of TRL's micro-batch (default 8: as many tokens, padded)")
    parser.add_argument(
        "--trl-weights",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of TRL: fp32 under bf16 autocast (default), or bf16, which is faster and loses small updates",
    )
    parser.add_argument("--pairs-file", type=Path, help="take the lengths of these pairs (prompt, chosen, rejected)")
    parser.add_argument("--tokenizer", type=Path, help="that counts the tokens of --pairs-file (default: of --model)")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 8 instead of all weights")
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward pass, both sides"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of posttrain's run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one side, in its own process
    args = parser.parse_args(words)
    is_tiny = args.shape == "tiny" and args.model is None
    for name, usual, tiny in (
        ("pairs", 32, 4),
        ("max_tokens", 1024, 64),
        ("micro_tokens", 16384, 256),
        ("micro_pairs", 8, 2),
    ):
        if getattr(args, name) is None:
            setattr(args, name, tiny if is_tiny else usual)
    args.micro_pairs = min(args.micro_pairs, args.pairs)
    if args.steps < 1 or args.pairs % args.micro_pairs:
        parser.error("--steps is at least 1, and --pairs a multiple of --micro-pairs")
    return args


def pair_lengths(args: argparse.Namespace) -> list[PairLengths]:
    count = args.pairs * args.steps
    if args.pairs_file is None:
        scale = args.max_tokens / 1024 if args.max_tokens < 256 else 1.0  # a test's pairs are short, not all cut off
        return like_ultrafeedback(count, args.max_tokens, args.seed, scale)
    folder = args.tokenizer or args.model
    if folder is None:
        raise InputError("--pairs-file: its texts are counted in tokens; give --tokenizer or --model, a folder")
    from transformers import AutoTokenizer

    return from_file(args.pairs_file, AutoTokenizer.from_pretrained(folder), count, args.max_tokens)


def job_of(args: argparse.Namespace, side: str, lengths: list[PairLengths]) -> DpoJob:
    device = resolve_device(args.device)
    return DpoJob(
        side=side,
        model=chosen_model(args.shape, args.model),
        device=device,
        dtype=dtype_name(resolve_dtype(args.dtype, device)),
        lengths=[astuple(pair) for pair in lengths],
        pairs_per_step=args.pairs,
        max_tokens=args.max_tokens,
        micro_batch_tokens=args.micro_tokens,
        micro_batch_pairs=args.micro_pairs,
        trl_weights=args.trl_weights,
        lora=args.lora,
        checkpointing=args.checkpointing,
        seed=args.seed,
        overrides=tuple(args.set) if side == POSTTRAIN else (),
    )


def do_job(job: dict[str, Any]) -> Result:
    return measure(DpoJob(**job))


def show(results: dict[str, Result]) -> str:
    peer = results.get(TRL, {})
    rows: list[list[Any]] = []
    for side, result in results.items():
        if "error" in result:
            rows.append([TITLES[side], "failed", *[None] * 6])
            continue
        is_peer = side == TRL
        rows.append(
            [
                TITLES[side],
                result["pairs_per_s"],
                "" if is_peer else ratio(result["pairs_per_s"], peer.get("pairs_per_s")),
            ]
            + [result["peak_gib"], "" if is_peer else ratio(result["peak_gib"], peer.get("peak_gib"))]
            + [f"{loss:.4f}" for loss in (result["losses"][0], result["losses"][-1], result["grad_norms"][0])]
        )
    return table(["", "pairs/s", "of TRL", "peak GiB", "of TRL", "first loss", "last loss", "first gradient"], rows)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.job:
        return serve_side(args.job, do_job)
    lengths = pair_lengths(args)
    job = job_of(args, POSTTRAIN, lengths)
    mean = sum(2 * pair.prompt + pair.chosen + pair.rejected for pair in lengths) / len(lengths)
    print(
        f"{job.model}, {'LoRA' if job.lora else 'all weights'}, {job.dtype}: {args.steps} steps of {args.pairs} pairs, "
        f"{mean:.0f} tokens a pair in two whole sequences, at most {args.max_tokens} in one",
        flush=True,
    )
    results: dict[str, Result] = {}
    for side in args.sides:
        print(f"{TITLES[side]} …", file=sys.stderr, flush=True)
        results[side] = run_side(__file__, job_of(args, side, lengths).as_json())
    print(f"\n{show(results)}")
    show_failures(results)
    fine = {side: result for side, result in results.items() if "error" not in result}
    ratios: dict[str, float] = {}
    different = False
    if len(fine) == 2:
        ratios = {name: fine[POSTTRAIN][name] / fine[TRL][name] for name in ("pairs_per_s", "peak_gib")}
        # At the start policy and reference are equal and every loss is ln 2; the gradient tells one job from another.
        first = [fine[side]["grad_norms"][0] for side in (TRL, POSTTRAIN)]
        different = not args.lora and abs(first[0] - first[1]) > SAME_GRADIENT * abs(first[0])
        if different:
            print(f"not the same job: the norms of the first gradients are {first[0]:.5f} and {first[1]:.5f}")
    report = {**facts(job.device), "benchmark": "dpo_step", "job": {**job.as_json(), "side": None}, "sides": results}
    write_json(args.out, {**report, "ratios": ratios})
    return 1 if different or POSTTRAIN in results.keys() - fine.keys() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"dpo_step: {error}")
