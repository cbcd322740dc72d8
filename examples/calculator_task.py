"""A task in which a tool helps: products of two numbers, which a small model cannot compute but a calculator can.

The SFT examples show two ways of answering: some call the calculator and copy its result, others give a round number.
So the model can do both, and GRPO learns which one is rewarded.
"""

from __future__ import annotations

import random
from pathlib import Path

from posttrain.apps.demo.arithmetic import answer, build_tokenizer, save_llama, write_jsonl
from posttrain.files.json_files import JsonObject

SMALLEST, LARGEST = 32, 99  # so that every product has four digits
SHARE_HELD_OUT = 0.1
SHARE_ASKING = 0.4  # of the examples: they use the calculator
GUESS = 5000

Row = JsonObject


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All products, shuffled and split: training and unseen problems."""
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(pairs)
    held_out = int(len(pairs) * SHARE_HELD_OUT)
    return pairs[held_out:], pairs[:held_out]


def question(a: int, b: int) -> str:
    return f"{a}*{b}=?"


def example(a: int, b: int, rng: random.Random) -> list[Row]:
    """A conversation: with the calculator, or a guess that is always the same."""
    asked = {"role": "user", "content": question(a, b)}
    if rng.random() < SHARE_ASKING:
        return [
            asked,
            {"role": "assistant", "content": f"<calc>{a}*{b}"},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": answer(a * b)},
        ]
    return [asked, {"role": "assistant", "content": answer(GUESS)}]


def write_data(folder: Path, seed: int) -> None:
    """examples.jsonl for SFT; train.jsonl and unseen.jsonl for GRPO."""
    folder.mkdir(parents=True, exist_ok=True)
    train, unseen = problems(seed)
    rng = random.Random(seed)
    write_jsonl(folder / "examples.jsonl", ({"messages": example(a, b, rng)} for a, b in train))
    for name, pairs in (("train", train), ("unseen", unseen)):
        write_jsonl(folder / f"{name}.jsonl", ({"input": question(a, b), "output": str(a * b)} for a, b in pairs))


def build_model(folder: Path, seed: int, hidden_size: int = 64) -> int:
    """Write a small random Llama and its tokenizer as a Hugging Face folder; its number of parameters."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<calc>"])
    return save_llama(
        folder,
        tokenizer,
        seed,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},  # short contexts: it learns to copy
    )
