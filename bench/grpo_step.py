#!/usr/bin/env python3
"""GRPO end to end on one GPU, in NeMo RL's terms: each stage of the step with its seconds, its share and its tokens per
second.

    python bench/grpo_step.py --shape llama-8b --out grpo.json  64 prompts x 32 samples of about 900 tokens, KL on
    python bench/grpo_step.py --shape llama-8b --lora
    python bench/grpo_step.py --workload long-prompt --shape llama-1.5b     with and without sharing of the prompt
    python bench/grpo_step.py --workload long-context --lora --checkpointing --micro-tokens 135168 \
        --logprob-tokens 135168
                                                                            8 answers to a prompt that fills the context
    python bench/grpo_step.py --shape tiny                                  on a CPU, in a minute: does it all run?

Tokens are those of full sequences, prompt and answer of every sample, in every stage. A small step goes before the
measured one and warms up. `--set` changes any setting of the run, as on posttrain's own command line. See README.md
here.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from grpo_job import GrpoJob, measure
from machine import dtype_name, facts, resolve_device, resolve_dtype
from shapes import SHAPES, chosen_model
from side_process import Result, run_side, serve_side, show_failures
from tables import ratio, table, write_json

from posttrain.errors import InputError
from posttrain.reporting.rows import TOTAL_STEP, top_level_stages

# (prompts, samples of each, prompt tokens, new tokens), at full size and at the size of a test.
WORKLOADS = {
    "math": ((64, 32, 128, 772), (4, 4, 12, 8)),
    "long-prompt": ((32, 16, 1024, 128), (4, 4, 48, 6)),
    "long-context": ((1, 8, 130560, 512), (1, 4, 400, 6)),
}
# What others have published for an 8B Llama with GRPO, in the same terms: tokens per second and GPU, end to end. All
# weights, as far as is published; on other GPUs, with answers that end by themselves and GPUs that wait for each other.
PUBLISHED = {
    "NeMo RL v0.5, 16 x H100, on-policy": 1581.0,
    "NeMo RL v0.4 on GKE, 16 x B200, checkpointing included": 1087.21,
}
# Which calls of the worker make up a stage, for the memory column.
CALLS_OF_STAGE = {
    "generation": ("generate",),
    "policy_and_reference_logprobs": ("logprobs", "reference_logprobs"),
    "policy_training": ("update",),
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="math", help="default: math")
    parser.add_argument("--shape", help=f"random weights of a shape: {', '.join(SHAPES)} (default by workload)")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    for name, of in (
        ("prompts", "of a step"),
        ("samples", "of each prompt"),
        ("prompt-tokens", ""),
        ("new-tokens", ""),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{of} (default by workload)".strip())
    parser.add_argument(
        "--micro-tokens", type=int, default=8192, help="tokens of a training micro-batch (default 8192)"
    )
    parser.add_argument("--logprob-tokens", type=int, default=16384, help="of one without gradients (default 16384)")
    parser.add_argument("--max-batch-size", type=int, default=512, help="sequences decoded together (default 512)")
    parser.add_argument(
        "--warm-up-prompts", type=int, default=2, help="prompts of the step before; 0: none (default 2)"
    )
    parser.add_argument("--steps", type=int, default=1, help="measured steps; the best counts (default 1)")
    parser.add_argument(
        "--kl", type=float, default=0.01, help="price of leaving the reference; 0: no reference (default .01)"
    )
    parser.add_argument("--lora", action="store_true", help="adapters of rank 8 instead of all weights")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument(
        "--sharing", choices=["on", "off", "both"], help="of prompts (default: on; both for long-prompt)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--profile", action="store_true", help="also the ten largest costs of a step (one step more)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one run, in its own process
    args = parser.parse_args(words)
    if args.steps < 1 or args.warm_up_prompts < 0:
        parser.error("--steps is at least 1, --warm-up-prompts at least 0")
    return args


def job_of(args: argparse.Namespace) -> GrpoJob:
    shape = args.shape or ("llama-1.5b" if args.workload == "long-prompt" else "llama-8b")
    usual, tiny = WORKLOADS[args.workload]
    sizes = tiny if shape == "tiny" and args.model is None else usual
    given = (args.prompts, args.samples, args.prompt_tokens, args.new_tokens)
    prompts, samples, prompt_tokens, new_tokens = (said or size for said, size in zip(given, sizes, strict=True))
    device = resolve_device(args.device)
    return GrpoJob(
        model=chosen_model(shape, args.model),
        device=device,
        dtype=dtype_name(resolve_dtype(args.dtype, device)),
        num_prompts=prompts,
        num_samples=samples,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        micro_batch_tokens=max(args.micro_tokens, prompt_tokens + new_tokens),
        logprob_tokens=max(args.logprob_tokens, prompt_tokens + new_tokens),
        max_batch_size=args.max_batch_size,
        warm_up_prompts=min(args.warm_up_prompts, prompts),
        steps=args.steps,
        kl_penalty=args.kl,
        lora=args.lora,
        checkpointing=args.checkpointing,
        profile=args.profile,
        overrides=tuple(args.set),
    )


def do_job(job: dict[str, Any]) -> Result:
    return measure(GrpoJob(**{**job, "overrides": tuple(job["overrides"])}))


def stage_table(result: Result) -> str:
    timings, tokens = result["timings_s"], result["num_tokens"]
    total = timings[TOTAL_STEP]
    stages = top_level_stages(timings)
    stages["everything else"] = total - sum(stages.values())
    rows: list[list[Any]] = []
    for stage, seconds in sorted(stages.items(), key=lambda item: -item[1]):
        peaks = [result["peak_gib"].get(call) for call in CALLS_OF_STAGE.get(stage, ())]
        known = [peak for peak in peaks if peak is not None]
        rate = tokens / seconds if stage in CALLS_OF_STAGE and seconds > 0 else None
        rows.append([stage, seconds, f"{seconds / total:.1%}", rate, max(known) if known else None])
    rows.append(["total step time", total, "100.0%", tokens / total, None])
    return table(["stage", "seconds", "share", "tokens/s per GPU", "peak GiB"], rows)


def remarks(result: Result) -> list[str]:
    rates, metrics = result["performance"], result["metrics"]
    lines = [
        f"{result['num_samples']} samples, {result['num_tokens']:,} tokens, "
        f"{rates['mean_total_tokens_per_sample']:.0f} a sample; {rates['samples_per_sec_per_gpu']:.2f} samples/s per "
        "GPU"
    ]
    if "train_mfu" in rates:
        lines.append(
            f"training {rates['train_flops_per_gpu']:.0f} TFLOP/s, {rates['train_mfu']:.1%} of the data sheet's peak, "
            "of the "
            "plain algorithm's work: shared prompts and frozen weights count in full"
        )
    if "token_mult_prob_error" in metrics:
        lines.append(f"sampler against trainer: mean exp(|difference|) {metrics['token_mult_prob_error']:.4f}")
    return lines


def show(name: str, result: Result, *, published: bool) -> None:
    print(f"\n{name}\n{stage_table(result)}")
    for line in remarks(result):
        print(f"- {line}")
    if published:
        ours = result["performance"]["tokens_per_sec_per_gpu"]
        for who, rate in PUBLISHED.items():
            print(f"- {ratio(ours, rate)} the {rate:,.0f} tokens/s per GPU of {who}")
    if text := result.pop("profile_text", None):
        print(f"\n{text}")


def _is_published(args: argparse.Namespace, job: GrpoJob) -> bool:
    """Whether others have published figures of such a job: all weights of 8B."""
    return args.workload == "math" and job.model == "llama-8b" and not job.lora


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.job:
        return serve_side(args.job, do_job)
    job = job_of(args)
    sharing = args.sharing or ("both" if args.workload == "long-prompt" else "on")
    print(
        f"{job.model}, {'LoRA' if job.lora else 'all weights'}, {job.dtype}, KL {job.kl_penalty:g}: {job.num_prompts} "
        "prompts x "
        f"{job.num_samples} samples, {job.prompt_tokens} + {job.new_tokens} tokens",
        flush=True,
    )
    results: dict[str, Result] = {}
    for name, shares in (("prompts shared", True), ("prompts not shared", False)):
        if sharing == "both" or (sharing == "on") == shares:
            print(f"{name} …", file=sys.stderr, flush=True)
            one = replace(job, share_prompts=shares, profile=job.profile and shares)
            results[name] = run_side(__file__, one.as_json())
            if "error" not in results[name]:
                show(name, results[name], published=_is_published(args, job))
    totals = [result["timings_s"][TOTAL_STEP] for result in results.values() if "error" not in result]
    faster = totals[1] / totals[0] if len(totals) == 2 else None
    if faster:
        print(f"\nwith sharing of prompts the step is {faster:.2f} times as fast")
    show_failures(results)
    report = {**facts(job.device), "benchmark": "grpo_step", "job": job.as_json(), "runs": results}
    write_json(args.out, {**report, "ratios": {"sharing": faster}})
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"grpo_step: {error}")
