"""Draws one token per row of logits, with keyed noise, and returns its log-probability.

**The draw** is the Gumbel-max trick on two levels: blocks of about sqrt(V) tokens compete with the log of their mass,
then the tokens of the winning block compete with each other. This is an exact sample of the softmax with 2*sqrt(V)
noise values instead of V. Inverting the CDF would take a single value, but all of its V boundaries move when logits are
rounded differently (another batch size, another number of ranks). Measured with SmolLM2-135M in fp32, logits computed
in one pass against token by token: 31 of 18,000 draws changed with inversion, none with Gumbel-max, because an argmax
changes only if its two best candidates are equal to rounding.

**The log-probability** is that of the full row of logits divided by the temperature, before top-k and top-p and with
the padding of the vocabulary: what a trainer computes from the same logits. At temperature 0 it is taken at temperature
1. If the answer has to obey a grammar, it is that of the tokens that the grammar allows (`constraints.py`).

**On their way to the host** (`Drawn`), nothing waits for the device, except to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from posttrain.engines.native.constraints import exclude_tokens
from posttrain.engines.native.noise import gumbel, token_keys
from posttrain.engines.native.scheduler import Sample
from posttrain.policy.runtime import to_device, triton_kernels
from posttrain.types import Sampling

_KERNELS = "engines.native.kernels"
# First noise index of blocks, beyond any vocabulary.
_BLOCK_INDEX = 1 << 40
# For larger nuclei, sort the whole row.
_NUCLEUS_GUESS = 1024


@dataclass(frozen=True, eq=False)
class TokenSampler:
    """`vocab_size` is the tokenizer's: output columns beyond it are padding and never drawn."""

    sampling: Sampling
    vocab_size: int

    @property
    def is_plain(self) -> bool:
        """Neither top-k nor top-p."""
        return not self.sampling.top_k and self.sampling.top_p == 1.0

    @property
    def inverse_temperature(self) -> float:
        """0: greedy."""
        return 0.0 if self.sampling.temperature == 0.0 else 1.0 / self.sampling.temperature

    def draw(self, logits: Tensor, sequence_keys: Tensor, token_index: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities, both [rows], for logits [rows, head's vocabulary]."""
        temperature = self.sampling.temperature
        if self.is_plain and logits.is_cuda and triton_kernels(_KERNELS) is not None:
            inverse = logits.new_full((len(logits),), self.inverse_temperature, dtype=torch.float32)
            return draw_plain(logits, sequence_keys, token_index, inverse, self.vocab_size)
        scores = logits.float()
        if temperature not in (0.0, 1.0):
            scores = scores * self.inverse_temperature
        candidates, padding = scores[:, : self.vocab_size], scores[:, self.vocab_size :]
        top = candidates.amax(dim=-1, keepdim=True)
        masses = (candidates - top).exp_()
        if temperature == 0.0:
            tokens = candidates.argmax(dim=-1)
        else:
            tokens = self._sample(candidates, masses, token_keys(sequence_keys, token_index))
        # Relative to the maximum score: large logits would lose precision.
        total = masses.sum(dim=-1, keepdim=True).log()
        if padding.shape[1]:
            total = torch.logaddexp(total, padding.logsumexp(dim=-1, keepdim=True) - top)
        logprobs = scores.gather(1, tokens[:, None]) - top - total
        return tokens, logprobs.squeeze(1)

    def _sample(self, scores: Tensor, masses: Tensor, keys: Tensor) -> Tensor:
        if self.sampling.top_k or self.sampling.top_p < 1.0:
            excluded = scores < _smallest_kept(scores, self.sampling.top_k, self.sampling.top_p)
            scores = scores.masked_fill(excluded, float("-inf"))
            masses = masses.masked_fill(excluded, 0.0)
        size = block_size(scores.shape[1])
        block_masses = _sum_blocks(masses, size)
        blocks = torch.arange(block_masses.shape[1], device=scores.device)
        noise = gumbel(keys[:, None], blocks + _BLOCK_INDEX)
        block = (block_masses.double().log() + noise).argmax(dim=-1)

        members = block[:, None] * size + torch.arange(size, device=scores.device)
        values = scores.gather(1, members.clamp(max=scores.shape[1] - 1)).double() + gumbel(keys[:, None], members)
        values = values.masked_fill(members >= scores.shape[1], float("-inf"))
        return members.gather(1, values.argmax(dim=-1, keepdim=True)).squeeze(1)


def draw_plain(
    logits: Tensor, sequence_keys: Tensor, token_index: Tensor, inverse_temperature: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """`TokenSampler.draw` of rows with different temperatures, without top-k and top-p.

    `inverse_temperature`: [rows], float32; 0: greedy.
    """
    if logits.is_cuda and (kernels := triton_kernels(_KERNELS)) is not None:  # the same draw in one pass
        return kernels.sample_rows(logits, sequence_keys, token_index, inverse_temperature, vocab_size=vocab_size)
    is_greedy = inverse_temperature == 0.0
    scores = logits.float() * inverse_temperature.masked_fill(is_greedy, 1.0)[:, None]
    best, sampled = (
        TokenSampler(Sampling(1, temperature), vocab_size).draw(scores, sequence_keys, token_index)
        for temperature in (0.0, 1.0)
    )
    return torch.where(is_greedy, best[0], sampled[0]), torch.where(is_greedy, best[1], sampled[1])


def block_size(vocab_size: int) -> int:
    """The smallest power of two that is at least the square root of the vocabulary size."""
    return 1 << ((vocab_size - 1).bit_length() + 1) // 2


def _sum_blocks(masses: Tensor, size: int) -> Tensor:
    vocab_size = masses.shape[1]
    whole = vocab_size // size * size
    sums = masses[:, :whole].unflatten(1, (-1, size)).sum(dim=-1)
    if whole == vocab_size:
        return sums
    return torch.cat([sums, masses[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


def _smallest_kept(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """The lowest score kept by top-k, then top-p; [rows, 1]. Ties are kept."""
    vocab_size = scores.shape[1]
    if top_k and top_k < vocab_size:
        ordered = scores.topk(top_k, dim=-1).values
        if top_p == 1.0:
            return ordered[:, -1:]
        return _nucleus_end(ordered, ordered.logsumexp(dim=-1, keepdim=True), top_p)
    if top_p == 1.0:
        return scores.amin(dim=-1, keepdim=True)
    total = scores.logsumexp(dim=-1, keepdim=True)
    if scores.device.type == "cpu" and vocab_size > _NUCLEUS_GUESS:
        # Sorting a whole row costs as much as the model, and the nucleus is nearly always small. The check is free on a
        # CPU, but would synchronise a GPU.
        ordered = scores.topk(_NUCLEUS_GUESS, dim=-1).values
        if bool((ordered.sub(total).exp_().sum(dim=-1) >= top_p).all()):
            return _nucleus_end(ordered, total, top_p)
    return _nucleus_end(scores.sort(dim=-1, descending=True).values, total, top_p)


def _nucleus_end(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    """The score at which the cumulative mass reaches `top_p`; at least the best token is kept."""
    probabilities = (ordered - total).exp_()
    # On a GPU, the sum of a single row would be split over processors in a nondeterministic order.
    rows = probabilities.expand(2, -1) if len(probabilities) == 1 and probabilities.is_cuda else probabilities
    before = rows.cumsum(dim=-1)[: len(probabilities)] - probabilities
    kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, kept - 1)


class DrawSettings(Protocol):
    """How the tokens of a sample are drawn, and what is reported of them."""

    sampler: TokenSampler
    num_top_logprobs: int  # the most probable tokens that are reported

    @property
    def is_constrained(self) -> bool:
        """Whether the answer obeys a grammar."""


Candidates = tuple[tuple[int, float], ...]  # the most probable tokens with their log-probabilities


@dataclass
class TopLogprobs:
    """The most probable tokens, with the sampler's log-probabilities. A row: ids, then log-probabilities."""

    wanted: Mapping[int, int]  # row of the batch -> number of tokens
    values: Tensor  # [wanted rows, 2 * largest number]; float64 holds every token id and every float32


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

    def read_candidates(self) -> dict[int, Candidates]:
        """By row, where they were requested. After `read`."""
        if self.top is None:
            return {}
        found = {}
        for (row, number), best in zip(self.top.wanted.items(), self.top.values.tolist(), strict=True):
            ids, logprobs = best[: len(best) // 2], best[len(best) // 2 :]
            drawn, of_drawn = self.values[:, row].tolist()  # the same to the last bit, wherever it is listed
            listed = zip(ids[:number], logprobs[:number], strict=True)
            found[row] = tuple((int(token), of_drawn if token == drawn else value) for token, value in listed)
        return found


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def draw(samples: Sequence[Sample], settings: Sequence[DrawSettings], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, both [samples]. Rows with equal settings are drawn together."""
    device = logits.device
    exclude_tokens(samples, logits)
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


def top_logprobs(settings: Sequence[DrawSettings], logits: Tensor) -> TopLogprobs | None:
    """What the rows that requested the most probable tokens need; None if no row did. After `draw`."""
    wanted = {row: one.num_top_logprobs for row, one in enumerate(settings) if one.num_top_logprobs}
    if not wanted:
        return None
    vocab_size = settings[0].sampler.vocab_size
    factors = [settings[row].sampler.inverse_temperature or 1.0 for row in wanted]
    at, scale = (to_device(torch.tensor(values), logits.device) for values in (list(wanted), factors))
    logprobs = (logits.index_select(0, at).float() * scale[:, None]).log_softmax(dim=-1)
    best = logprobs[:, :vocab_size].topk(min(max(wanted.values()), vocab_size), dim=-1)
    return TopLogprobs(wanted, torch.cat([best.indices.double(), best.values.double()], dim=1))
