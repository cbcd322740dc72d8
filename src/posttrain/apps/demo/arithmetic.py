"""The demo's task and model: sums of two numbers, a tokenizer that reads them digit by digit, and a small Llama.

The model first learns the format from examples whose answers are mostly wrong. Its answers then have the right format
and are sometimes right, which is what GRPO needs to start from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain.files.json_files import JsonMapping

LARGEST = 49  # so that every number and every sum has two digits
SHARE_HELD_OUT = 0.1
NUM_CARELESS_ANSWERS = 15  # to each problem, in the examples
SHARE_RIGHT = 0.35  # of the answers in the examples

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|answer|>{{ message['content'] }}<|end|>"
    "{% else %}<|ask|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All sums of two numbers up to LARGEST, shuffled and split: training and unseen problems."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    held_out = int(len(pairs) * SHARE_HELD_OUT)
    return pairs[held_out:], pairs[:held_out]


def question(a: int, b: int) -> str:
    return f"{a:02d} + {b:02d} = ?"


def answer(value: int) -> str:
    return f"\\boxed{{{value:02d}}}"


def careless_answer(a: int, b: int, rng: random.Random) -> int:
    """Sometimes right; otherwise one or ten too many or too few."""
    right = a + b
    if rng.random() < SHARE_RIGHT:
        return right
    return max(0, right + rng.choice((-10, -1, 1, 10)))


def write_data(folder: Path, seed: int) -> None:
    """examples.jsonl for SFT; train.jsonl and unseen.jsonl for GRPO."""
    folder.mkdir(parents=True, exist_ok=True)
    train, unseen = problems(seed)
    rng = random.Random(seed)

    def examples() -> Iterator[dict[str, str]]:
        for a, b in train * NUM_CARELESS_ANSWERS:
            yield {"input": question(a, b), "output": answer(careless_answer(a, b, rng))}

    write_jsonl(folder / "examples.jsonl", examples())
    for name, pairs in (("train", train), ("unseen", unseen)):
        rows = ({"input": question(a, b), "output": str(a + b)} for a, b in pairs)
        write_jsonl(folder / f"{name}.jsonl", rows)


def labelled_traces(seed: int, num_prompts: int, answers_per_prompt: int) -> Iterator[JsonMapping]:
    """Careless answers to training problems, each with a reward of 1 or 0."""
    train, _ = problems(seed)
    for a, b in train[:num_prompts]:
        rng = random.Random(f"{seed}/{a}/{b}")  # one per prompt: more prompts do not change the answers to the others
        for _ in range(answers_per_prompt):
            result = careless_answer(a, b, rng)
            row = {"input": question(a, b), "output": answer(result), "final_reward": float(result == a + b)}
            yield {**row, "reference": str(a + b)}


def unseen_problems(seed: int) -> Iterator[JsonMapping]:
    _, unseen = problems(seed)
    return ({"problem": question(a, b), "answer": str(a + b)} for a, b in unseen)


def write_jsonl(path: Path, rows: Iterable[JsonMapping]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with one token for `\\boxed{` so that answers are short."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|ask|>", "<|answer|>"]})
    fast.add_tokens(["\\boxed{"])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(folder: Path, seed: int, *, hidden_size: int = 128, intermediate_size: int = 1024) -> int:
    """Write a small random Llama and its tokenizer as a Hugging Face folder; its number of parameters."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": 3}
    return save_llama(folder, build_tokenizer(), seed, max_position_embeddings=256, **sizes)


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **config: object) -> int:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            **config,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def run_settings(model: Path, run: Path, learning_rate: float) -> list[str]:
    """Overrides of every run that trains this model."""
    return [
        f"policy.model_name={model}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.num_threads=1",  # matrices this small gain nothing from a second thread, and lose on a busy machine
        "policy.max_total_sequence_length=64",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192}",
        "policy.optimizer.name=torch.optim.AdamW",
        f"policy.optimizer.kwargs={{lr: {learning_rate}, weight_decay: 0.01, betas: [0.9, 0.98]}}",
        f"checkpointing.checkpoint_dir={run}",
        "cluster.launcher=local",
    ]


def sft_settings(model: Path, data: Path, run: Path, seed: int, steps: int) -> list[str]:
    """Overrides of the run that teaches the format, but for the schedule and how often it saves."""
    return [
        *run_settings(model, run, 1e-3),
        f"sft.max_num_steps={steps}",
        f"sft.seed={seed}",
        "sft.val_at_start=false",
        "sft.val_period=0",
        "policy.train_global_batch_size=64",
        f"data.train={{dataset_name: ResponseDataset, data_path: {data / 'examples.jsonl'}}}",
        "data.validation=null",
        "checkpointing.metric_name=null",
    ]
