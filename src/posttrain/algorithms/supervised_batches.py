"""Batches of recorded answers, for the algorithms that sample nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.types import Example, Pair, TokenBatch


def pair_batch(pairs: Sequence[Pair]) -> TokenBatch:
    """Chosen, rejected, chosen, rejected, …; both answers of a pair share their prompt."""
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    return TokenBatch.build(
        prompts=[pair.prompt_ids for pair in pairs],
        responses=responses,
        prompt_of=[index for index in range(len(pairs)) for _ in range(2)],
        columns={"mask": torch.ones(sum(len(ids) for ids in responses))},
    )


def example_batch(examples: Sequence[Example]) -> TokenBatch:
    masks = [list(example.mask) or [True] * len(example.response_ids) for example in examples]
    return TokenBatch.build(
        prompts=[example.prompt_ids for example in examples],
        responses=[example.response_ids for example in examples],
        prompt_of=range(len(examples)),
        columns={"mask": torch.tensor([float(trained) for mask in masks for trained in mask])},
    )


def num_sequence_tokens(batch: TokenBatch) -> int:
    """Full sequences: every response with its prompt, shared or not."""
    return sum(len(batch.prompts[p]) + len(r) for p, r in zip(batch.prompt_of, batch.responses, strict=True))
