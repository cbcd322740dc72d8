"""What both sides do: one GRPO or DPO job, fixed down to the token, as a JSON file that each side reads.

Knows no trainer. Work is fixed by construction: every sampled answer has exactly `num_new_tokens` tokens, and every
preference sequence exactly `num_sequence_tokens`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

GRPO, DPO = "grpo", "dpo"
TRL, POSTTRAIN = "trl", "posttrain"

_SENTENCE = "the small ship sails over blue water while seven birds follow it home and rest near old stone walls"
WORDS = tuple(_SENTENCE.split())


@dataclass(frozen=True)
class Job:
    """Sizes of the job, and the texts it works on."""

    kind: str
    model: str  # folder with weights and tokenizer
    num_steps: int
    num_threads: int
    num_prompts: int = 8
    num_samples: int = 8  # answers to each prompt
    num_new_tokens: int = 64
    num_prompt_tokens: int = 0  # of every prompt; 0: short questions of some forty tokens
    num_pairs: int = 8
    num_sequence_tokens: int = 256  # of each of the two sequences of a pair; half of them are the prompt
    trl_micro_batch: int = 16  # answers (GRPO) or pairs (DPO) in one forward pass of TRL
    posttrain_micro_batch_tokens: int = 0  # tokens in one forward pass of posttrain
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    dpo_beta: float = 0.1
    goal_speed: float | None = None  # posttrain's step is to be this many times faster than TRL's
    goal_memory: float | None = None  # and to take at most this share of its memory
    rows: Sequence[dict[str, str]] = field(default_factory=list)  # {input} or {prompt, chosen, rejected}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    @property
    def work(self) -> str:
        if self.kind == GRPO:
            prompts = f"{self.num_prompts} prompts" + (
                f" of {self.num_prompt_tokens} tokens" if self.num_prompt_tokens else ""
            )
            return f"{prompts} x {self.num_samples} samples x {self.num_new_tokens} new tokens"
        return f"{self.num_pairs} pairs x 2 sequences x {self.num_sequence_tokens} tokens"


@dataclass
class StepTime:
    """One optimizer step. `tokens` counts full sequences: every answer with its prompt, padding left out."""

    seconds: float
    cpu_seconds: float
    tokens: int
    computed_tokens: int  # positions that the training pass feeds to the model, padding included
    stages: dict[str, float]  # generation (GRPO) or reference (DPO), and training
    loss: float | None = None
    grad_norm: float | None = None


def prompt_rows(count: int) -> list[dict[str, str]]:
    return [{"input": f"Tell me an interesting fact about the number {i}."} for i in range(count)]


def long_prompt_rows(tokenizer: Any, count: int, num_tokens: int) -> list[dict[str, str]]:
    """Questions whose prompt, as the chat template writes it, has exactly `num_tokens` tokens. Each has its
    own text.
    """
    rows = []
    for i in range(count):
        # Tokens may join where the question meets the template, so the length is found, not computed.
        for length in range(num_tokens, 0, -1):
            row = {"input": _text_of(tokenizer, length, seed=i).strip()}
            if (excess := prompt_length(tokenizer, row) - num_tokens) <= 0:
                break
        assert excess == 0, f"no question makes a prompt of {num_tokens} tokens with this chat template"
        rows.append(row)
    return rows


def prompt_length(tokenizer: Any, row: dict[str, str]) -> int:
    """Tokens of the prompt that both sides make of the row."""
    messages = [{"role": "user", "content": row["input"]}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return len(rendered["input_ids"])


def pair_rows(tokenizer: Any, count: int, num_tokens: int) -> list[dict[str, str]]:
    """Pairs whose prompt is half of `num_tokens` and whose answers, with the end of sequence, are the rest."""
    half = num_tokens // 2
    rows = []
    for i in range(count):
        prompt, chosen, rejected = (
            _text_of(tokenizer, length, seed=3 * i + k)
            for k, length in enumerate((half, num_tokens - half - 1, num_tokens - half - 1))
        )
        for answer in (chosen, rejected):
            together = _ids(tokenizer, prompt + answer)
            assert together == _ids(tokenizer, prompt) + _ids(tokenizer, answer), "no token across the seam"
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def _text_of(tokenizer: Any, num_tokens: int, seed: int) -> str:
    """A text of exactly `num_tokens` tokens that begins with a space, so that it can follow another."""
    rng = random.Random(seed)
    ids = _ids(tokenizer, "".join(f" {rng.choice(WORDS)}" for _ in range(num_tokens)))[:num_tokens]
    text: str = tokenizer.decode(ids)
    assert _ids(tokenizer, text) == ids, "the text reads back as the same tokens"
    return text


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def fingerprint(sequences: Iterable[Sequence[int]]) -> str:
    """Of a set of token sequences: the same whatever their order, and however often each occurs."""
    distinct = sorted({tuple(sequence) for sequence in sequences})
    return sha256(repr(distinct).encode()).hexdigest()[:16]


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory a process ever held (VmHWM); unlike getrusage's figure it begins anew with the program."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has ended already


def peaks_of_helpers(pid: int | None = None) -> dict[int, int]:
    """The peak of each process that this one (or `pid`) has started and that is still there."""
    peaks = {}
    try:
        for helper in psutil.Process(pid).children(recursive=True):
            peaks[helper.pid] = peak_bytes(helper.pid)
    except (psutil.NoSuchProcess, OSError):
        pass  # one that ended while we looked
    return peaks


def write_result(
    path: Path,
    steps: Sequence[StepTime],
    inputs: Iterable[Sequence[int]],
    version: str,
    helpers: Mapping[int, int] | None = None,
) -> None:
    """What a side hands back. `inputs`: the prompts (GRPO) or the whole sequences (DPO) it was given, as tokens."""
    result = {
        "version": version,
        "steps": [asdict(step) for step in steps],
        "inputs": fingerprint(inputs),
        "peak_bytes": peak_bytes(),
        "helpers": {str(pid): peak for pid, peak in (helpers or {}).items()},
    }
    path.write_text(json.dumps(result))
