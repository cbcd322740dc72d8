"""Tokens drawn on the device and their way to the host. Nothing here waits for the device, except to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from posttrain.engines.native.sampler import TokenSampler
from posttrain.engines.native.scheduler import Sample
from posttrain.policy.runtime import to_device


class DrawSettings(Protocol):
    """How the tokens of a sample are drawn, and what is reported of them."""

    sampler: TokenSampler
    num_top_logprobs: int | None  # None: the model's own log-probabilities are not needed


@dataclass(frozen=True)
class ModelLogprobs:
    """The model's log-probabilities at temperature 1: of the drawn token, and of the most probable ones."""

    of_token: float
    top: tuple[tuple[int, float], ...]


@dataclass
class TopLogprobs:
    """Log-probabilities for `ModelLogprobs`. A row: that of the token, then the most probable ids, then theirs."""

    wanted: Mapping[int, int]  # row of the batch -> number of most probable tokens
    values: Tensor  # [wanted rows, 1 + 2 * largest number]; float64 holds every token id and every float32


@dataclass
class Drawn:
    """The next token of each sample and its log-probability, with the copy to the host in flight."""

    samples: Sequence[Sample]
    values: Tensor  # [2, samples]; float64 holds every token id and every float32
    arrived: torch.cuda.Event | None = None
    top: TopLogprobs | None = None  # if requested for some row

    @classmethod
    def to_host(cls, samples: Sequence[Sample], values: Tensor, top: TopLogprobs | None = None) -> Drawn:
        """`values` may be overwritten by the next step: the copy to the host is queued before it."""
        host = _to_host(values)
        if top is not None:
            top = TopLogprobs(top.wanted, _to_host(top.values))
        arrived = None
        if values.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return cls(samples, host, arrived, top)

    def read(self) -> tuple[list[int], list[float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values[0].long().tolist(), self.values[1].tolist()

    def read_model_logprobs(self) -> dict[int, ModelLogprobs]:
        """By row, where they were requested. After `read`."""
        if self.top is None:
            return {}
        found = {}
        for (row, number), (of_token, *best) in zip(self.top.wanted.items(), self.top.values.tolist(), strict=True):
            ids, logprobs = best[: len(best) // 2], best[len(best) // 2 :]
            found[row] = ModelLogprobs(of_token, tuple(zip(map(int, ids[:number]), logprobs[:number], strict=True)))
        return found


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def draw(samples: Sequence[Sample], settings: Sequence[DrawSettings], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, both [samples]. Rows with equal settings are drawn together."""
    device = logits.device
    noise = [[sample.noise_key for sample in samples], [sample.noise_index for sample in samples]]
    keys, index = to_device(torch.tensor(noise, dtype=torch.long), device)
    rows_of: dict[TokenSampler, list[int]] = {}
    for row, one in enumerate(settings):
        rows_of.setdefault(one.sampler, []).append(row)
    if len(rows_of) == 1:
        return settings[0].sampler.draw(logits, keys, index)
    tokens = torch.empty(len(samples), dtype=torch.long, device=device)
    logprobs = torch.empty(len(samples), dtype=torch.float32, device=device)
    for sampler, rows in rows_of.items():
        at = to_device(torch.tensor(rows), device)
        drawn = sampler.draw(*(part.index_select(0, at) for part in (logits, keys, index)))
        tokens.index_copy_(0, at, drawn[0])
        logprobs.index_copy_(0, at, drawn[1])
    return tokens, logprobs


def top_logprobs(settings: Sequence[DrawSettings], logits: Tensor, tokens: Tensor) -> TopLogprobs | None:
    """What the rows that requested the model's log-probabilities need; None if no row did."""
    wanted = {row: one.num_top_logprobs for row, one in enumerate(settings) if one.num_top_logprobs is not None}
    if not wanted:
        return None
    vocab_size = settings[0].sampler.vocab_size
    at = to_device(torch.tensor(list(wanted)), logits.device)
    logprobs = logits.index_select(0, at).float().log_softmax(dim=-1)
    of_token = logprobs.gather(1, tokens.index_select(0, at)[:, None])
    best = logprobs[:, :vocab_size].topk(min(max(1, *wanted.values()), vocab_size), dim=-1)
    return TopLogprobs(wanted, torch.cat([part.double() for part in (of_token, best.indices, best.values)], dim=1))
