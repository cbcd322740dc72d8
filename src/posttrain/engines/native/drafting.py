"""Drafts of the next tokens, looked up in texts of the same group, and their acceptance. In torch: the reference of
`kernels/drafting.py`, and what runs on a CPU.

Noise is keyed, so the token at a position is a function of the logits and the key. A draft is accepted exactly when it equals
that token: a wrong one costs time and changes nothing.

All texts lie in one row of numbers, `text`, with -1 between them and in the room that unfinished answers have left. The texts
of a group are neighbours. A draft of a sample is what followed the last occurrence of the longest of its suffixes that occurs
among them (prompt lookup, Saxena 2023, over siblings as well). The -1 before a text counts as part of it: answers that begin
alike match from their first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What the state of a sample consists of, int64 each.
END, POSITION, KEY, INDEX, LEFT, FROM, TO = range(7)
NUM_FIELDS = 7
# Suffixes of this many tokens are told apart; a match of fewer than the second number is none.
LONGEST_MATCH, SHORTEST_MATCH = 8, 2
# The first text has this many numbers before it, so that suffixes can be read without asking where it begins.
MARGIN = LONGEST_MATCH
NOTHING = -1


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, [samples, 1 + drafts] each: a sample's last token, then its draft."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor  # of the cache; rows that are not computed have slots of the scratch page
    lengths: Tensor  # int32: positions that the row sees
    keys: Tensor
    index: Tensor  # of the noise
    num_rows: Tensor  # [samples]: how many rows of the sample count

    @classmethod
    def empty(cls, num_samples: int, width: int, device: torch.device) -> StepRows:
        def numbers(dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(num_samples, width, dtype=dtype, device=device)

        rows = numbers(), numbers(), numbers(), numbers(torch.int32), numbers(), numbers()
        return cls(*rows, torch.zeros(num_samples, dtype=torch.long, device=device))


def lay_out(
    groups: Sequence[Sequence[tuple[Sequence[int], int]]],
) -> tuple[np.ndarray, list[list[int]], list[tuple[int, int]]]:
    """Texts behind each other, each with room for more tokens. Returns the numbers; where each text begins, by group; and
    where the texts of each group begin and end."""
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
    width: int,  # rows of each sample: 1 and the longest draft
    page_size: int,
    scratch_page: int,
) -> StepRows:
    """The rows of the next step. A sample's rows end with its draft, its pages or its limit."""
    rows = StepRows.empty(state.shape[1], width, text.device)
    for sample, (end, position, key, index, left, begin, stop) in enumerate(state.T.tolist()):
        tokens = [int(text[end])] + _draft(text, end, begin, stop, width - 1)
        count = 0
        while count < min(len(tokens), left) and int(table[sample, (position + count) // page_size]) != scratch_page:
            count += 1
        rows.num_rows[sample] = count
        for at in range(width):
            there = at < count
            page = int(table[sample, (position + at) // page_size]) if there else scratch_page
            rows.tokens[sample, at] = tokens[at] if there else 0
            rows.positions[sample, at] = position + at if there else 0
            rows.slots[sample, at] = page * page_size + (position + at) % page_size
            rows.lengths[sample, at] = position + at + 1 if there else 1
            rows.keys[sample, at], rows.index[sample, at] = key, index + at
    return rows


def _draft(text: Tensor, end: int, begin: int, stop: int, most: int) -> list[int]:
    if stop <= begin or most < 1:
        return []
    same = torch.ones(stop - begin, dtype=torch.bool)
    length = torch.zeros(stop - begin, dtype=torch.long)
    for back in range(LONGEST_MATCH):
        same = same & (text[begin - back : stop - back] == text[end - back])
        length += same
    at = torch.arange(begin, stop)
    length[(at == end) | (text[begin + 1 : stop + 1] < 0)] = 0
    best = int((length * text.numel() + at).argmax())
    if length[best] < SHORTEST_MATCH:
        return []
    draft: list[int] = []
    for token in text[begin + best + 1 : begin + best + 1 + most].tolist():
        if token < 0:
            break
        draft.append(token)
    return draft


def accept(text: Tensor, state: Tensor, rows: StepRows, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Append the tokens that were drawn as far as the draft was right, and one more. `tokens` and `logprobs` are those of the
    rows. Returns [2 + 2 * width, samples] float64: how many tokens, how many rows; the tokens; their log-probabilities."""
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
