#!/usr/bin/env python3
"""Sampling: posttrain's native engine beside `transformers` and vLLM. Tokens per second, and the ratio to each.

    python bench/decode.py --shape llama-8b --workload 512x128+256 512x128+900 --engines native vllm --out decode.json
    python bench/decode.py --shape llama-1.5b --workload 64x512+512-g16 --engines native vllm
    python bench/decode.py --shape llama-8b --workload long-tail --engines native vllm --profile
    python bench/decode.py --shape tiny                    on a CPU, in a minute: does it all run?

A workload is SAMPLESxPROMPT+NEW tokens, -gN for N samples of each prompt, MIN..MAX for lengths with a long tail. Each
engine is started once, in a process of its own, one after the other, and samples all workloads. See README.md here for
what is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import decode_vllm
from decode_engines import CONTINUOUS, GENERATE, NATIVE, measure
from decode_job import DecodeJob
from machine import dtype_name, facts, resolve_device, resolve_dtype
from shapes import SHAPES, chosen_model
from side_process import Result, run_side, serve_side, show_failures
from tables import ratio, table, write_json
from workloads import workload

from posttrain.errors import InputError

VLLM = "vllm"
ENGINES = (NATIVE, GENERATE, CONTINUOUS, VLLM)
TITLES = {
    NATIVE: "posttrain, native engine",
    GENERATE: "transformers generate",
    CONTINUOUS: "transformers continuous batching",
    VLLM: "vLLM",
}
TINY_WORKLOADS = ("6x12+8", "8x12+6-g4")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--workload", nargs="+", help="default: 512x128+256")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all; vllm if it is installed")
    parser.add_argument("--repeats", type=int, default=2, help="measured runs of each; the best counts (default 2)")
    parser.add_argument("--max-batch-size", type=int, default=512, help="sequences decoded together (default 512)")
    parser.add_argument("--generate-batch", type=int, default=256, help="rows of a call of generate (default 256)")
    parser.add_argument("--vllm-memory", type=float, default=0.9, help="gpu_memory_utilization of vLLM (default 0.9)")
    parser.add_argument("--native", action="append", default=[], metavar="KEY=VALUE", help="a NativeSettings field")
    parser.add_argument(
        "--vllm", action="append", default=[], metavar="KEY=VALUE", help="an option of vLLM, such as quantization=fp8"
    )
    parser.add_argument(
        "--release", action="store_true", help="the native engine gives its cache up before each run, as for training"
    )
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="the native engine as on several GPUs that train: modules of FSDP",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="also the ten largest costs of the native engine")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one engine, in its own process
    args = parser.parse_args(words)
    if args.repeats < 1:
        parser.error("--repeats is at least 1")
    return args


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def options_of(words: list[str], flag: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"{flag} {word!r}: give KEY=VALUE, such as kv_cache_gib=40 or quantization=fp8")
        numbers = {"true": True, "false": False, "none": None}
        options[key] = numbers[value.lower()] if value.lower() in numbers else _number(value)
    return options


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def jobs(args: argparse.Namespace, names: Sequence[str]) -> list[DecodeJob]:
    device = resolve_device(args.device)
    engines = args.engines or [engine for engine in ENGINES if engine != VLLM or (has_vllm() and device == "cuda")]
    native, vllm = options_of(args.native, "--native"), options_of(args.vllm, "--vllm")
    return [
        DecodeJob(
            engine=engine,
            model=chosen_model(args.shape, args.model),
            workloads=tuple(names),
            device=device,
            dtype=dtype_name(resolve_dtype(args.dtype, device)),
            repeats=args.repeats,
            seed=args.seed,
            max_batch_size=args.max_batch_size,
            generate_batch=args.generate_batch,
            gpu_memory_utilization=args.vllm_memory,
            native=native if engine == NATIVE else {},
            vllm=vllm if engine == VLLM else {},
            sharded=args.sharded and engine == NATIVE,
            release=args.release and engine == NATIVE,
            profile=args.profile and engine == NATIVE,
        )
        for engine in engines
    ]


def do_job(job: dict[str, Any]) -> Result:
    """A side, in this process."""
    decode_job = DecodeJob(**{**job, "workloads": tuple(job["workloads"])})
    return decode_vllm.measure(decode_job) if decode_job.engine == VLLM else measure(decode_job)


def show(name: str, model: str, results: dict[str, Result]) -> str:
    work = workload(name)
    rates = finished(name, results)
    rows = []
    for engine, result in results.items():
        if (found := rates.get(engine)) is None:
            rows.append([TITLES[engine], "failed", *[None] * 6])
            continue
        faster = (
            ""
            if engine == NATIVE or NATIVE not in rates
            else ratio(rates[NATIVE]["tokens_per_s"], found["tokens_per_s"])
        )
        columns = [found[column] for column in ("tokens_per_s", "ms_per_step", "prompts_s", "warm_up_s", "peak_gib")]
        rows.append([TITLES[engine], *columns[:3], result["start_s"], *columns[3:], faster])
    header = ["", "tokens/s", "ms/step", "prompts s", "first token s", "warm-up s", "peak GiB", "native is"]
    title = f"{model}, {name}: {work.num_sequences} sequences, {work.num_new_tokens:,} new tokens, logprobs on"
    return f"\n{title}\n{table(header, rows)}"


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.job:
        return serve_side(args.job, do_job)
    names = args.workload or (TINY_WORKLOADS if args.shape == "tiny" and not args.model else ["512x128+256"])
    for name in names:
        workload(name)  # refuse a wrong name before an hour of work
    model = chosen_model(args.shape, args.model)
    results: dict[str, Result] = {}
    for job in jobs(args, names):
        print(f"{TITLES[job.engine]} …", file=sys.stderr, flush=True)
        environment = decode_vllm.ENVIRONMENT if job.engine == VLLM else None
        results[job.engine] = run_side(__file__, job.as_json(), environment)
    for name in names:
        print(show(name, model, results), flush=True)
    if text := results.get(NATIVE, {}).pop("profile_text", None):
        print(f"\n{names[0]}: {text}")
    show_failures(results)
    for engine, result in results.items():
        show_failures({f"{TITLES[engine]}, {name}": found for name, found in result.get("workloads", {}).items()})
    report = {
        "benchmark": "decode",
        "model": model,
        "engines": results,
        "ratios": {name: ratios(name, results) for name in names},
    }
    write_json(args.out, {**facts(resolve_device(args.device)), **report})
    return 1 if NATIVE in results and any(NATIVE not in finished(name, results) for name in names) else 0


def finished(name: str, results: dict[str, Result]) -> dict[str, Result]:
    """What each engine measured of the workload; of those that did it."""
    found = {engine: result["workloads"][name] for engine, result in results.items() if "error" not in result}
    return {engine: result for engine, result in found.items() if "error" not in result}


def ratios(name: str, results: dict[str, Result]) -> dict[str, float]:
    """The native engine's speed over that of each other engine."""
    rates = {engine: result["tokens_per_s"] for engine, result in finished(name, results).items()}
    if NATIVE not in rates:
        return {}
    return {engine: rates[NATIVE] / rate for engine, rate in rates.items() if engine != NATIVE}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"decode: {error}")
