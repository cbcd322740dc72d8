"""Prompts through the model into the cache, and the logits that the first tokens are drawn from.

What a call and a session have in common: both decide elsewhere whose prompts come next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.engines.native.attention import PrefillAttention, PrefillPiece
from posttrain.engines.native.forward import ForwardPass
from posttrain.engines.native.kv_cache import PagedKvCache
from posttrain.engines.native.scheduler import Prefill, PromptGroup, Sample


def prefill(forward: ForwardPass, cache: PagedKvCache, jobs: Sequence[Prefill], max_tokens: int) -> None:
    """Several prompts in one packed row; one that is longer than a row goes through in pieces."""
    for row in packed_rows(jobs, max_tokens):
        tokens: list[int] = []
        positions: list[int] = []
        pieces: list[PrefillPiece] = []
        ends: list[tuple[PromptGroup, int]] = []
        for job, begin, end in row:
            pieces.append(PrefillPiece(len(tokens), end - begin, job.start + begin, job.pages))
            tokens += job.token_ids[begin:end]
            positions += range(job.start + begin, job.start + end)
            if job.group is not None and end == len(job.token_ids):
                ends.append((job.group, len(tokens) - 1))
        inputs = torch.tensor([tokens, positions], dtype=torch.long).to(cache.device)
        hidden = forward.hidden(PrefillAttention(cache, pieces), inputs[0], inputs[1])
        last = hidden.index_select(0, torch.tensor([at for _, at in ends], dtype=torch.long).to(hidden.device))
        for (group, _), vector in zip(ends, last, strict=True):
            group.last_hidden = vector.clone()  # not a view: one prompt would keep those of all others alive


def first_logits(forward: ForwardPass, samples: Sequence[Sample]) -> Tensor:
    """[samples, vocabulary]: all samples of a group draw their first token from one row of logits."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    row_of = {group: row for row, group in enumerate(groups)}
    logits = forward.head.logits(torch.stack([_last_hidden(group) for group in groups]))
    rows = torch.tensor([row_of[sample.group] for sample in samples]).to(logits.device)
    return logits.index_select(0, rows)


def packed_rows(jobs: Sequence[Prefill], max_tokens: int) -> Iterator[list[tuple[Prefill, int, int]]]:
    """Rows of at most `max_tokens`, each a list of (job, begin, end). A job is cut only if it is longer than a row."""
    row: list[tuple[Prefill, int, int]] = []
    used = 0
    for job in jobs:
        length = len(job.token_ids)
        if row and used + length > max_tokens:
            yield row
            row, used = [], 0
        begin = 0
        while length - begin > max_tokens:
            yield [(job, begin, begin + max_tokens)]
            begin += max_tokens
        row.append((job, begin, length))
        used += length - begin
    if row:
        yield row


def _last_hidden(group: PromptGroup) -> Tensor:
    assert group.last_hidden is not None, "a prompt is computed before its samples start"
    return group.last_hidden
