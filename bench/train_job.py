"""What the sides of `train.py` do: sequences of random tokens, one optimizer step on all of them, log-probabilities of
all.

The loss is the mean negative log-likelihood of every token but the first of its sequence, so the sides' losses can be
compared.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from machine import resolve_dtype
from shapes import FIRST_WORD, vocab_size_of

POSTTRAIN, FP8, STOCK, TRL = "posttrain", "posttrain-fp8", "stock", "trl"


@dataclass(frozen=True)
class TrainJob:
    side: str
    model: str
    device: str
    dtype: str
    num_sequences: int  # of an optimizer step
    sequence_tokens: int
    shortest_tokens: int  # equal to `sequence_tokens`: all sequences have the same length
    micro_batch_tokens: int
    logprob_tokens: int
    steps: int
    seed: int = 0
    lora: bool = False
    checkpointing: bool = False  # of activations
    logprobs_only: bool = False
    profile: bool = False
    overrides: tuple[str, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return resolve_dtype(self.dtype, self.device)

    def sequences(self) -> list[list[int]]:
        rng, vocab = random.Random(self.seed), vocab_size_of(self.model)
        lengths = [rng.randint(self.shortest_tokens, self.sequence_tokens) for _ in range(self.num_sequences)]
        return [[rng.randrange(FIRST_WORD, vocab) for _ in range(length)] for length in lengths]

    def num_rows(self, max_tokens: int) -> int:
        """Of a micro-batch of the sides that pad: as many as fit the same budget of tokens."""
        return max(1, max_tokens // self.sequence_tokens)


def flops_of(model: Any) -> float:
    """Forward and backward of one token: six times the weights that are multiplied. Attention is left out."""
    from posttrain.models.loading import flops_per_token

    return flops_per_token(model)
