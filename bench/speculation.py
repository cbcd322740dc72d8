#!/usr/bin/env python3
"""Decoding with drafts beside decoding without: the same tokens, and how much faster.

    python bench/speculation.py --model MODEL --data gsm8k/test.jsonl --prompts 64 --samples 16 --new-tokens 512
    python bench/speculation.py --shape tiny --prompts 1000 --per-call 32 --samples 4 --new-tokens 48 \\
        --device cpu --drafts 3 7

Problems of a file with the key `question`, through the model's chat template, or random prompts of 8 to 40 tokens. Each
setting samples the same prompts `--repeats` times; the first time steps are captured. `equal` counts the answers whose
tokens are those of decoding without drafts. In float32 they all are. In bf16 products of other shapes round
differently, and the second row shows what another batch size alone changes. `tokens a step` are what an answer draws in
a step with drafts, `drafted` is the share of tokens drawn in such steps.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import dtype_name, facts, resolve_device, resolve_dtype, seconds_of
from problems import read_problems
from shapes import FIRST_WORD, SHAPES, open_model, vocab_size_of
from tables import table, write_json

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.types import Completion, NoiseKey, Sampling, Task

OFF = "off"
ROUNDING = "off, batches of another size"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--shape", default="tiny", help=f"else random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--data", type=Path, help="JSON lines with the key question, .gz or not; else random prompts")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--per-call", type=int, help="prompts that are sampled together (default all)")
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=256, help="answers that are decoded together")
    parser.add_argument("--drafts", nargs="+", default=["auto"], help="auto, or numbers of tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--precision", choices=["auto", "fp8"], default="auto", help="of the sampler's products")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    return parser.parse_args(words)


@dataclass
class Result:
    seconds: list[float]
    answers: list[Completion]
    drafted_tokens: int
    drafted_steps: int

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    def equal_to(self, other: Result) -> int:
        return sum(a.token_ids == b.token_ids for a, b in zip(self.answers, other.answers, strict=True))


def prompts_of(args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> list[tuple[int, ...]]:
    if args.data is None:
        rng = random.Random(0)
        return [tuple(rng.choices(range(FIRST_WORD, vocab_size), k=rng.randint(8, 40))) for _ in range(args.prompts)]
    questions = [problem["question"] for problem in read_problems(args.data)[: args.prompts]]
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [
        tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        for message in messages
    ]


def sample(model: Any, tokenizer: Any, tasks: list[Task], args: argparse.Namespace, batch: int, drafts: Any) -> Result:
    longest = max(len(task.prompt_ids) for task in tasks) + args.new_tokens
    settings = NativeSettings(
        max_batch_size=batch, max_total_tokens=longest, precision=args.precision, num_speculative_tokens=drafts
    )
    engine = NativeEngine(model, tokenizer, settings)
    sampling, at_once = Sampling(args.new_tokens, temperature=args.temperature), args.per_call or len(tasks)
    answers: list[Completion] = []
    drafted = [0, 0]

    def once() -> None:
        answers.clear()
        drafted[:] = 0, 0
        for start in range(0, len(tasks), at_once):
            groups = engine.generate(tasks[start : start + at_once], args.samples, sampling, NoiseKey(0, 0))
            answers.extend(answer for group in groups for answer in group)
            drafted[:] = (total + new for total, new in zip(drafted, engine.drafted, strict=True))

    seconds = [seconds_of(once) for _ in range(args.repeats)]
    engine.release()
    return Result(seconds, answers, *drafted)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    device = resolve_device(args.device)
    name = str(args.model or args.shape)
    model, tokenizer = open_model(name, device, resolve_dtype(args.dtype, device))
    prompts = prompts_of(args, tokenizer, 0 if args.data is not None else vocab_size_of(name))
    tasks = [Task(draw, f"bench:{draw}", "", prompt) for draw, prompt in enumerate(prompts)]
    results = {OFF: sample(model, tokenizer, tasks, args, args.batch, 0)}
    results[ROUNDING] = sample(model, tokenizer, tasks, args, max(1, args.batch // 3), 0)
    for drafts in args.drafts:
        number = drafts if drafts == "auto" else int(drafts)
        results[f"drafts: {drafts}"] = sample(model, tokenizer, tasks, args, args.batch, number)
    plain = results[OFF]
    rows = []
    for title, result in results.items():
        rate = result.num_tokens / min(result.seconds)
        rows.append([
            title, f"{result.seconds[0]:.2f}", f"{min(result.seconds):.2f}", f"{rate:,.0f}",
            f"{min(plain.seconds) / min(result.seconds):.2f}", f"{plain.seconds[0] / result.seconds[0]:.2f}",
            f"{result.equal_to(plain)} of {len(plain.answers)}",
            f"{result.drafted_tokens / result.drafted_steps:.2f}" if result.drafted_steps else "-",
            f"{result.drafted_tokens / result.num_tokens:.0%}",
        ])  # fmt: skip
    lengths = sorted(len(answer.token_ids) for answer in plain.answers)
    middle, last = lengths[len(lengths) // 2], lengths[-1]
    print(f"\n{name}, {dtype_name(model.dtype)}, {len(tasks)} prompts x {args.samples}, T = {args.temperature:g}, "
          f"{plain.num_tokens:,} tokens, lengths {lengths[0]} to {last}, median {middle}")  # fmt: skip
    columns = ["decoding", "first s", "best s", "tokens/s", "ratio", "first", "equal", "tokens a step", "drafted"]
    print(table(columns, rows))
    numbers = {
        title: {
            "seconds": result.seconds, "tokens": result.num_tokens, "equal": result.equal_to(plain),
            "drafted_tokens": result.drafted_tokens, "drafted_steps": result.drafted_steps,
        }
        for title, result in results.items()
    }  # fmt: skip
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(args.out, {**facts(device), "benchmark": "speculation", "settings": settings, "results": numbers})
    return 0


if __name__ == "__main__":
    sys.exit(main())
