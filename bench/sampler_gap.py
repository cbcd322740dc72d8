#!/usr/bin/env python3
"""How far a sampler is from the trainer whose weights it has: bf16, FP8, and FP8 with parts left in bf16.

    python bench/sampler_gap.py --shape llama-8b --out gap.json             random weights
    python bench/sampler_gap.py --text problems.jsonl --seconds 60          weights trained here, on the lines of a file
    python bench/sampler_gap.py --shape tiny                                on a CPU: bf16 alone, does it run?

Each sampler draws answers to the same prompts at temperature 1; the trainer computes the log-probabilities of their
tokens in bf16. `exp|d|` is the mean over tokens of exp(abs(difference)), what a run reports as token_mult_prob_error.
`ess` is the effective sample size of the weights w = exp(trainer - sampler) as a share of the tokens, (sum w)^2 / (n
sum w^2). `kl` is the mean of sampler - trainer.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import dtype_name, facts, resolve_device, resolve_dtype
from shapes import FIRST_WORD, SHAPES, make_tokenizer, open_model, vocab_size_of
from tables import table, write_json
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.models.attention_interface import ATTENTION, attention_context
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

SAMPLERS: dict[str, dict[str, Any]] = {
    "as the weights are": {},
    "FP8": {"precision": "fp8"},
    "FP8, cache in bf16": {"precision": "fp8", "kv_cache_dtype": "bfloat16"},
    "FP8, first and last layer in bf16": {
        "precision": "fp8", "num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 1,
    },
    "FP8, first and last two in bf16": {
        "precision": "fp8", "num_first_layers_in_bf16": 2, "num_last_layers_in_bf16": 2,
    },
}  # fmt: skip
# A model of bytes that a GPU trains in a minute.
TRAINED = {
    "vocab_size": 512,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_TRAINED_ROWS, _TRAINED_LENGTH = 64, 512


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", help=f"random weights of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of random weights")
    parser.add_argument("--text", type=Path, help="train a small model of bytes on this file, and take that")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which it is trained (default 60)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    return parser.parse_args(words)


# -- a model that has learnt something ---------------------------------------------------------------------------------


def train_on(text: bytes, seconds: float, device: str) -> tuple[PreTrainedModel, float]:
    """A small model of the bytes of `text`, and its last loss in nats per byte."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long() + FIRST_WORD
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TRAINED), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ends, loss = time.monotonic() + seconds, torch.tensor(0.0)
    while time.monotonic() < ends:
        starts = torch.randint(len(ids) - _TRAINED_LENGTH - 1, (_TRAINED_ROWS,), device=device)
        rows = ids[starts[:, None] + torch.arange(_TRAINED_LENGTH + 1, device=device)]
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sampled = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    sampled.load_state_dict(model.state_dict())
    sampled.config.use_cache = False
    return sampled.to(device).eval(), float(loss)


# -- the difference ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, tasks: list[Task], groups: list[list[Completion]]) -> Tensor:
    found = []
    score = TokenLogprobs(model)
    for task, (completion,) in zip(tasks, groups, strict=True):
        mask = {"mask": torch.ones(len(completion.token_ids))}
        row = PackedRow.build(TokenBatch.build([task.prompt_ids], [completion.token_ids], [0], mask), model.device)
        with attention_context(row.attention):
            found.append(score(row, 1.0).double().cpu())
    return torch.cat(found)


def difference(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    weights = (theirs - ours).exp()
    return {
        "exp|d|": float((ours - theirs).abs().exp().mean()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "kl": float((ours - theirs).mean()),
        "largest": float((ours - theirs).abs().max()),
        "logprob": float(ours.mean()),
        "tokens": len(ours),
    }


def measure(model: PreTrainedModel, tokenizer: Any, tasks: list[Task], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in SAMPLERS.items():
        if options and model.device.type != "cuda":
            continue
        sizes = {"max_batch_size": len(tasks), "max_total_tokens": args.prompt_tokens + args.new_tokens}
        engine = NativeEngine(model, tokenizer, NativeSettings(**sizes, **options))
        groups = engine.generate(tasks, 1, Sampling(args.new_tokens, ignore_eos=True), NoiseKey(0, 0))
        engine.release()
        ours = torch.tensor([logprob for (completion,) in groups for logprob in completion.logprobs]).double()
        found[name] = difference(ours, trainer_logprobs(model, tasks, groups))
    return found


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    device, rng = resolve_device(args.device), random.Random(0)
    if args.text is not None:
        text = args.text.read_bytes()
        model, loss = train_on(text, args.seconds, device)
        tokenizer: Any = make_tokenizer(TRAINED["vocab_size"])
        name = f"trained on {args.text.name}, {loss:.3f} nats per byte"
        starts = [rng.randrange(len(text) - args.prompt_tokens) for _ in range(args.prompts)]
        prompts = [[byte + FIRST_WORD for byte in text[start : start + args.prompt_tokens]] for start in starts]
    else:
        name = str(args.model or args.shape)
        model, tokenizer = open_model(name, device, resolve_dtype("auto", device))
        words_of = range(FIRST_WORD, vocab_size_of(name))
        prompts = [rng.choices(words_of, k=args.prompt_tokens) for _ in range(args.prompts)]
    tokenizer.decode = lambda *_, **__: ""  # the text is not needed
    tasks = [Task(draw, f"gap:{draw}", "", tuple(prompt)) for draw, prompt in enumerate(prompts)]
    found = measure(model, tokenizer, tasks, args)
    columns = list(next(iter(found.values())))
    print(f"\n{name}, {dtype_name(model.dtype)}, {args.prompts} x ({args.prompt_tokens} -> {args.new_tokens})")
    print(table(["sampler", *columns], [[sampler, *map(_shown, values.values())] for sampler, values in found.items()]))
    write_json(args.out, {**facts(device), "benchmark": "sampler_gap", "model": name, "samplers": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
