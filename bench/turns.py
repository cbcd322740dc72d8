#!/usr/bin/env python3
"""Conversations of many turns: prompt tokens that the native engine computes, and seconds, with and without the cache
that is kept between turns.

    python bench/turns.py --shape llama-1.5b --prompts 32 --turns 10 30 --out turns.json
    python bench/turns.py --shape tiny --turns 10 20 30        on a CPU, in a few minutes

Each turn samples `--new` tokens and is answered by `--observed` random ones. `distinct` counts the tokens that only a
prefill can compute: the prompt of each group once, and of every turn the observation and the last sampled token, whose
keys decoding has not computed. `computed` is what was prefilled. With the cache it grows linearly with the turns,
without it with their square. `equal` counts the turns whose tokens are the same on both sides: all of them in float32;
in bf16 other shapes round differently.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from machine import dtype_name, facts, resolve_device, resolve_dtype, seconds_of
from shapes import FIRST_WORD, SHAPES, chosen_model, open_model
from tables import ratio, table, write_json

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.types import NoiseKey, Sampling, Task


@dataclass
class Result:
    turns: int
    cached: bool
    seconds: float
    computed: int
    distinct: int
    answers: list[tuple[int, ...]]


def converse(engine: NativeEngine, args: argparse.Namespace, num_turns: int) -> list[tuple[int, ...]]:
    """The tokens of all turns."""
    rng, words = random.Random(0), range(FIRST_WORD, engine.vocab_size)
    sampling, key = Sampling(args.new, ignore_eos=True), NoiseKey(seed=1, step=1)
    open_tasks: Sequence[Task] = [
        Task(draw, f"bench:{draw}", "", tuple(rng.choices(words, k=args.prompt))) for draw in range(args.prompts)
    ]
    answers = []
    for turn in range(num_turns):
        sampled = engine.generate(open_tasks, 1 if turn else args.samples, sampling, key)
        following = []
        for task, completions in zip(open_tasks, sampled, strict=True):
            for sample, completion in enumerate(completions, start=task.first_sample):
                answers.append(completion.token_ids)
                ids = (*completion.token_ids, *rng.choices(words, k=args.observed))
                first_token = task.first_token + len(ids)
                following.append(
                    replace(task, prompt_ids=(*task.prompt_ids, *ids), first_sample=sample, first_token=first_token)
                )
        open_tasks = following
    return answers


def measure(engine: NativeEngine, args: argparse.Namespace, num_turns: int, *, cached: bool) -> Result:
    engine.keep_prefixes(cached)
    answers: list[tuple[int, ...]] = []
    seconds = seconds_of(lambda: answers.extend(converse(engine, args, num_turns)))
    computed = engine.keep_prefixes(False).computed
    distinct = args.prompts * (args.prompt + args.samples * (num_turns - 1) * (1 + args.observed))
    result = Result(num_turns, cached, seconds, computed, distinct, answers)
    print(f"{num_turns} turns, {_name(result)}: {seconds:.1f} s, {computed:,} tokens prefilled", flush=True)
    return result


def _name(result: Result) -> str:
    return "cache kept" if result.cached else "prefilled each turn"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 30], help="of a conversation (default 10 30)")
    parser.add_argument("--prompts", type=int, default=1, help="groups (default 1)")
    parser.add_argument("--samples", type=int, default=16, help="conversations of a group (default 16)")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the first prompt (default 300)")
    parser.add_argument("--new", type=int, default=60, help="tokens sampled in a turn (default 60)")
    parser.add_argument("--observed", type=int, default=240, help="tokens of an observation (default 240)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> list[Result]:
    args = arguments(words)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    model, tokenizer = open_model(chosen_model(args.shape, args.model), device, dtype, seed=0)
    longest = args.prompt + max(args.turns) * (args.new + args.observed)
    engine = NativeEngine(model, tokenizer, NativeSettings(max_total_tokens=longest))
    results = [measure(engine, args, turns, cached=cached) for turns in args.turns for cached in (False, True)]
    rows = []
    for before, after in zip(results[::2], results[1::2], strict=True):
        equal = sum(one == other for one, other in zip(before.answers, after.answers, strict=True))
        for result in (before, after):
            rows.append(
                [
                    f"{result.turns} turns, {_name(result)}",
                    result.computed,
                    result.distinct,
                    result.computed / result.distinct,
                    result.seconds,
                    ratio(before.seconds, result.seconds),
                    f"{equal}/{len(result.answers)}",
                ]
            )
    print(table(["", "computed", "distinct", "computed/distinct", "seconds", "speed", "equal"], rows))
    keys = ("turns", "cached", "seconds", "computed", "distinct")
    kept = [{key: getattr(result, key) for key in keys} for result in results]
    write_json(args.out, {**facts(device), "dtype": dtype_name(dtype), "results": kept})
    return results


if __name__ == "__main__":
    main()
