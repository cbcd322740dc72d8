"""Batches of given answers, for the algorithms that sample nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.data.packing import PACK
from posttrain.types import Example, Judged, Pair, TokenBatch

MAX_SHIFT = 32  # largest shift tried


def pair_batch(pairs: Sequence[Pair]) -> TokenBatch:
    """Chosen, rejected, chosen, rejected, …; both answers of a pair share their prompt.

    `given_rewards` is each answer's reward in the data; `num_class_tokens` is the number of tokens in all chosen (or
    all rejected) answers of the batch.
    """
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    lengths = [len(ids) for ids in responses]
    rewards = [reward for pair in pairs for reward in (pair.chosen_reward, pair.rejected_reward)]
    num_tokens = [sum(lengths[0::2]), sum(lengths[1::2])] * len(pairs)
    packs = torch.tensor([pair.pack for pair in pairs for _ in range(2)], dtype=torch.long)
    packed = {PACK: packs.repeat_interleave(torch.tensor(lengths, dtype=torch.long))} if (packs >= 0).any() else {}
    return TokenBatch.build(
        prompts=[pair.prompt_ids for pair in pairs],
        responses=responses,
        prompt_of=[index for index in range(len(pairs)) for _ in range(2)],
        columns={
            "mask": torch.ones(sum(lengths)),
            "given_rewards": _per_token(rewards, lengths),
            "num_class_tokens": _per_token(num_tokens, lengths),
            **packed,
        },
    )


def judged_batch(answers: Sequence[Judged]) -> TokenBatch:
    """Single answers with their label, and the number of answers and tokens in the batch with the same label.

    Answers to the same prompt share its computation.
    """
    place = {prompt: index for index, prompt in enumerate(dict.fromkeys(answer.prompt_ids for answer in answers))}
    lengths = [len(answer.response_ids) for answer in answers]
    alike = {good: [n for n, a in zip(lengths, answers, strict=True) if a.desirable is good] for good in (True, False)}
    return TokenBatch.build(
        prompts=list(place),
        responses=[answer.response_ids for answer in answers],
        prompt_of=[place[answer.prompt_ids] for answer in answers],
        columns={
            "mask": torch.ones(sum(lengths)),
            "desirable": _per_token([answer.desirable for answer in answers], lengths),
            "num_class_sequences": _per_token([len(alike[answer.desirable]) for answer in answers], lengths),
            "num_class_tokens": _per_token([sum(alike[answer.desirable]) for answer in answers], lengths),
        },
    )


def mismatched_batch(batch: TokenBatch, max_total_tokens: int) -> TokenBatch:
    """Each prompt with the answer to another prompt, in the same prompt order. Long sequences are truncated."""
    shift = _mismatching_shift(batch.prompt_of)
    lengths = [max(1, max_total_tokens - len(batch.prompts[prompt])) for prompt in batch.prompt_of]
    responses = [batch.responses[row - shift][:length].tolist() for row, length in enumerate(lengths)]
    return TokenBatch.build(
        prompts=[prompt.tolist() for prompt in batch.prompts],
        responses=responses,
        prompt_of=batch.prompt_of,
        columns={"mask": torch.ones(sum(len(ids) for ids in responses))},
    )


def _mismatching_shift(prompt_of: Sequence[int]) -> int:
    """The shift of answers, in rows, that leaves the fewest with their own prompt; 1 if all prompts differ."""
    rows = range(len(prompt_of))
    shifts = range(1, max(2, min(len(rows), MAX_SHIFT)))
    return min(shifts, key=lambda shift: sum(prompt_of[row] == prompt_of[row - shift] for row in rows))


def example_batch(examples: Sequence[Example]) -> TokenBatch:
    masks = [list(example.mask) or [True] * len(example.response_ids) for example in examples]
    return TokenBatch.build(
        prompts=[example.prompt_ids for example in examples],
        responses=[example.response_ids for example in examples],
        prompt_of=range(len(examples)),
        columns={"mask": torch.tensor([float(trained) for mask in masks for trained in mask])},
    )


def _per_token(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
