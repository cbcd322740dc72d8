"""Drafting by n-gram lookup in the texts of the same group, and acceptance of drafts. Reference of
`kernels/drafting.py`, and the CPU implementation.

Noise is keyed, so the token at a position is a function of the logits and the key. A draft is accepted if and only if
it equals that token, so wrong drafts cost time but do not change the output.

All texts are stored in one array, `text`, with -1 as separator and in the space reserved for unfinished answers. The
texts of a group are adjacent. The draft of a sample is the continuation after the last occurrence of its longest suffix
found in the group's texts (prompt lookup, Saxena 2023, extended to siblings). The separator before a text belongs to
the suffix, so answers with the same beginning match from their first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The state of a sample, int64 each.
END, POSITION, KEY, INDEX, LEFT, FROM, TO = range(7)
NUM_FIELDS = 7
# Maximum suffix length. A match of a single token is enough for a draft, as drafts cost almost nothing.
LONGEST_MATCH = 8
# Padding before the first text, so that suffixes can be read without a bounds check.
MARGIN = LONGEST_MATCH
NOTHING = -1


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, [samples, 1 + drafts] each: a sample's last token, then its draft."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor  # cache slots; rows that are not computed use the scratch page
    lengths: Tensor  # int32: positions visible to the row
    keys: Tensor
    index: Tensor  # token index of the noise
    num_rows: Tensor  # [samples]: number of valid rows of the sample


def lay_out(
    groups: Sequence[Sequence[tuple[Sequence[int], int]]],
) -> tuple[np.ndarray, list[list[int]], list[tuple[int, int]]]:
    """Concatenates the texts, each with space for more tokens. Returns the array; the start of each text, by group; and
    start and end of each group's texts.
    """
    total = MARGIN + sum(len(text) + room + 1 for texts in groups for text, room in texts)
    numbers = np.full(total, NOTHING, dtype=np.int32)
    starts: list[list[int]] = []
    ranges: list[tuple[int, int]] = []
    at = MARGIN
    for texts in groups:
        begin = at
        starts.append([])
        for text, room in texts:
            starts[-1].append(at)
            numbers[at : at + len(text)] = text
            at += len(text) + room + 1
        ranges.append((begin, at - 1))
    return numbers, starts, ranges


def plan_rows(
    text: Tensor,  # [numbers], int32
    state: Tensor,  # [NUM_FIELDS, samples]
    table: Tensor,  # [samples, most pages], int32
    width: int,  # rows of each sample: 1 + the longest draft
    page_size: int,
    scratch_page: int,
) -> StepRows:
    """The rows of the next step. A sample's rows are limited by its draft, its pages and its length limit."""
    numbers, pages = text.cpu().numpy(), table.cpu().numpy()
    samples = state.T.tolist()
    values = np.zeros((6, len(samples), width), dtype=np.int64)
    values[2], values[3] = scratch_page * page_size, 1
    counts = []
    for sample, (end, position, key, index, left, begin, stop) in enumerate(samples):
        tokens = [int(numbers[end]), *_draft(numbers, end, begin, stop, width - 1)][:left]
        at = position + np.arange(len(tokens))
        page = pages[sample, at // page_size]
        absent = np.flatnonzero(page == scratch_page)
        count = int(absent[0]) if len(absent) else len(tokens)
        counts.append(count)
        at, page = at[:count], page[:count]
        values[2, sample] += (position + np.arange(width)) % page_size
        values[:4, sample, :count] = tokens[:count], at, page.astype(np.int64) * page_size + at % page_size, at + 1
        values[4, sample], values[5, sample] = key, index + np.arange(width)
    rows = torch.from_numpy(values).to(text.device)
    return StepRows(rows[0], rows[1], rows[2], rows[3].int(), rows[4], rows[5], torch.tensor(counts).to(text.device))


def _draft(text: np.ndarray, end: int, begin: int, stop: int, most: int) -> list[int]:
    same = text[begin:stop] == text[end]
    length = same.astype(np.int64)
    for back in range(1, LONGEST_MATCH):
        same &= text[begin - back : stop - back] == text[end - back]
        length += same
    length[text[begin + 1 : stop + 1] < 0] = 0
    if begin <= end < stop:
        length[end - begin] = 0
    if most < 1 or not length.any():
        return []
    best = begin + int(np.flatnonzero(length == length.max())[-1])
    draft = text[best + 1 : best + 1 + most]
    ends = np.flatnonzero(draft < 0)
    return (draft[: ends[0]] if len(ends) else draft).tolist()


def accept(text: Tensor, state: Tensor, rows: StepRows, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Append the accepted tokens and one more. `tokens` and `logprobs` are drawn per row. Returns [2 + 2 * width,
    samples] float64: number of tokens, number of rows, the tokens, their log-probabilities.
    """
    num_samples, width = rows.tokens.shape
    drawn, logprobs = tokens.view(num_samples, width), logprobs.view(num_samples, width)
    at = torch.arange(1, width, device=text.device)
    right = (drawn[:, :-1] == rows.tokens[:, 1:]) & (at < rows.num_rows[:, None])
    count = torch.where(rows.num_rows > 0, 1 + right.long().cumprod(dim=1).sum(dim=1), 0)
    for sample, number in enumerate(count.tolist()):
        end = int(state[END, sample])
        text[end + 1 : end + 1 + number] = drawn[sample, :number].int()
    for field, sign in ((END, 1), (POSITION, 1), (INDEX, 1), (LEFT, -1)):
        state[field] += sign * count
    return torch.cat([torch.stack([count, rows.num_rows]), drawn.T, logprobs.T]).double()
