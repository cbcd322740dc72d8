"""Random reward models of a few thousand parameters, and pairs for them. The bodies are those of `tiny_models`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, randomise, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from posttrain.models.attention_interface import ATTENTION, attention_context
from posttrain.policy.packed import PackedRow
from posttrain.policy.reward_head import SequenceScores
from posttrain.types import TokenBatch

PAD = 0  # in no sequence


def tiny_reward_model(
    family: str = "llama",
    *,
    attention: str = ATTENTION,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """The same family, seed and overrides always give the same weights, whatever the attention implementation.

    `dtype` is torch's default unless given.
    """
    config = copy.deepcopy(tiny_model(family, **overrides).config)
    config.num_labels, config.pad_token_id = 1, PAD
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    randomise(model, seed)
    return model.to(dtype or torch.get_default_dtype()).eval()


def random_pairs(lengths: list[int], prompt_lengths: list[int], seed: int = 0) -> TokenBatch:
    """Two responses to each prompt."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()

    prompts, responses = [ids(n) for n in prompt_lengths], [ids(n) for n in lengths]
    prompt_of = [index // 2 for index in range(len(lengths))]
    return TokenBatch.build(prompts, responses, prompt_of, {"mask": torch.ones(sum(lengths))})


def score_tokens(model: nn.Module, batch: TokenBatch) -> Tensor:
    """What an objective gets: the score of each response at its last token, 0 elsewhere."""
    row = PackedRow.build(batch, torch.device("cpu"), reads_own_token=True)
    with attention_context(row.attention):
        scores: Tensor = SequenceScores(model)(row)
    return scores
