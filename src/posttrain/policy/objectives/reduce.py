"""Sums over the response tokens of a micro-batch, whole or per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posttrain.types import TokenBatch


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several micro-batches or ranks as those of all of them together."""
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("_min"):
                combined[name] = min(combined[name], value)
            elif name.endswith("_max"):
                combined[name] = max(combined[name], value)
            else:
                combined[name] += value
    return combined


def sequence_ids(batch: TokenBatch, device: torch.device) -> Tensor:
    """For each response token, which response it belongs to."""
    lengths = torch.tensor(batch.response_lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)


def per_sequence(values: Tensor, ids: Tensor, num_sequences: int) -> Tensor:
    """Sum of `values` within each sequence."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(0, ids, values)


def masked_extreme(values: Tensor, mask: Tensor, *, largest: bool) -> Tensor:
    """The extreme of the values that count; the neutral element of min or max if none does."""
    neutral = float("-inf") if largest else float("inf")
    kept = values.detach().masked_fill(mask == 0, neutral)
    return kept.max() if largest else kept.min()


def sequence_values(batch: TokenBatch, name: str, device: torch.device) -> Tensor:
    """A column that has the same value at every token of a response, as one value per response."""
    column = batch.columns[name].to(device)
    starts = torch.tensor([0, *batch.response_lengths[:-1]], device=device).cumsum(0)
    return column[starts] if len(column) else column


# Of the log-probabilities that are added up. Two micro-batches round the same sum differently by about as much.
ROUNDING = 1e-6


def ranked(lead: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each lead is above zero, and whether it is nothing but rounding. `logprobs`: what it is a difference of.

    At the first step policy and reference are equal; without this, accuracy would depend on rounding errors.
    """
    is_tie = lead.abs() <= ROUNDING * logprobs.abs()
    return (lead > 0) & ~is_tie, is_tie
