# mypy: disable-error-code="no-untyped-def"
"""`drafting.py` on a GPU: one launch before the model and one after it, so that no step waits for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.engines.native.drafting import LONGEST_MATCH, StepRows
from posttrain.engines.native.kernels.shapes import next_power_of_two

_BLOCK = 1024  # text positions that a program compares at a time
_END, _POSITION, _KEY, _INDEX, _LEFT, _FROM, _TO = (tl.constexpr(field) for field in range(7))
_LONGEST = tl.constexpr(LONGEST_MATCH)
_LENGTH_FACTOR = tl.constexpr(1 << 40)  # a longer match outweighs any position


@triton.jit
def _plan_rows(
    text_ptr, state_ptr, state_stride, table_ptr, table_stride, scratch_page,
    token_ptr, position_ptr, slot_ptr, length_ptr, key_ptr, index_ptr, num_rows_ptr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    own = state_ptr + sample
    end = tl.load(own + _END * state_stride)
    position = tl.load(own + _POSITION * state_stride)
    key = tl.load(own + _KEY * state_stride)
    index = tl.load(own + _INDEX * state_stride)
    left = tl.load(own + _LEFT * state_stride)
    begin = tl.load(own + _FROM * state_stride)
    stop = tl.load(own + _TO * state_stride)

    best = tl.full([], 0, tl.int64)
    for low in range(begin, stop, BLOCK):
        at = low + tl.arange(0, BLOCK).to(tl.int64)
        there = at < stop
        same = there
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(_LONGEST):
            same = same & (tl.load(text_ptr + at - back, mask=there, other=-2) == tl.load(text_ptr + end - back))
            length += same.to(tl.int64)
        followed = tl.load(text_ptr + at + 1, mask=there, other=-1) >= 0
        length = tl.where(followed & (at != end), length, 0)
        best = tl.maximum(best, tl.max(length * _LENGTH_FACTOR + at, 0))
    source = best % _LENGTH_FACTOR
    found = best >= _LENGTH_FACTOR

    row = tl.arange(0, WIDTH_PADDED).to(tl.int64)
    # The first row is the sample's last token, the others what follows `source`.
    draft = tl.load(text_ptr + source + row, mask=found & (row > 0) & (row < WIDTH), other=-1)
    first = tl.load(text_ptr + end)
    token = tl.where(row == 0, first, draft)
    fits = (token >= 0) & (row < left) & (row < WIDTH)
    page = tl.load(table_ptr + sample.to(tl.int64) * table_stride + (position + row) // PAGE_SIZE, mask=fits, other=0)
    fits = fits & (page != scratch_page)
    count = tl.min(tl.where(fits, WIDTH_PADDED, row), 0)
    there = row < count
    page = tl.where(there, page, scratch_page).to(tl.int64)
    out = sample.to(tl.int64) * WIDTH + row
    written = row < WIDTH
    tl.store(token_ptr + out, tl.where(there, token, 0).to(tl.int64), mask=written)
    tl.store(position_ptr + out, tl.where(there, position + row, 0), mask=written)
    tl.store(slot_ptr + out, page * PAGE_SIZE + (position + row) % PAGE_SIZE, mask=written)
    tl.store(length_ptr + out, tl.where(there, position + row + 1, 1).to(tl.int32), mask=written)
    tl.store(key_ptr + out, tl.zeros([WIDTH_PADDED], tl.int64) + key, mask=written)
    tl.store(index_ptr + out, index + row, mask=written)
    tl.store(num_rows_ptr + sample, tl.minimum(count, WIDTH).to(tl.int64))


@triton.jit
def _accept(
    text_ptr, state_ptr, state_stride, token_ptr, num_rows_ptr, drawn_ptr, logprob_ptr, out_ptr, samples,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, WIDTH_PADDED).to(tl.int64)
    at = sample * WIDTH + row
    num_rows = tl.load(num_rows_ptr + sample)
    drawn = tl.load(drawn_ptr + at, mask=row < WIDTH, other=0)
    logprob = tl.load(logprob_ptr + at, mask=row < WIDTH, other=0.0)
    guess = tl.load(token_ptr + at + 1, mask=row + 1 < num_rows, other=-1)
    # The first row with a wrong draft or without a draft is the last valid row.
    wrong = (row + 1 >= num_rows) | (drawn != guess)
    count = tl.minimum(tl.min(tl.where(wrong, row, WIDTH_PADDED), 0) + 1, num_rows)

    own = state_ptr + sample
    end = tl.load(own + _END * state_stride)
    tl.store(text_ptr + end + 1 + row, drawn.to(tl.int32), mask=row < count)
    tl.store(own + _END * state_stride, end + count)
    tl.store(own + _POSITION * state_stride, tl.load(own + _POSITION * state_stride) + count)
    tl.store(own + _INDEX * state_stride, tl.load(own + _INDEX * state_stride) + count)
    tl.store(own + _LEFT * state_stride, tl.load(own + _LEFT * state_stride) - count)
    tl.store(out_ptr + sample, count.to(tl.float64))
    tl.store(out_ptr + samples + sample, num_rows.to(tl.float64))
    tl.store(out_ptr + (2 + row) * samples + sample, drawn.to(tl.float64), mask=row < WIDTH)
    tl.store(out_ptr + (2 + WIDTH + row) * samples + sample, logprob.to(tl.float64), mask=row < WIDTH)


def plan_rows(
    text: Tensor, state: Tensor, table: Tensor, width: int, page_size: int, scratch_page: int
) -> StepRows:  # fmt: skip
    """As in `drafting.py`."""
    samples = state.shape[1]
    assert text.dtype == table.dtype == torch.int32, "texts and the page table are int32"
    assert state.stride(1) == table.stride(1) == 1, "the samples of a field and the pages of a sample are contiguous"
    tokens, positions, slots, keys, index = torch.empty(5, samples, width, dtype=torch.int64, device=text.device)
    lengths = torch.empty(samples, width, dtype=torch.int32, device=text.device)
    num_rows = torch.empty(samples, dtype=torch.int64, device=text.device)
    rows = StepRows(tokens, positions, slots, lengths, keys, index, num_rows)
    _plan_rows[(samples,)](
        text, state, state.stride(0), table, table.stride(0), scratch_page,
        rows.tokens, rows.positions, rows.slots, rows.lengths, rows.keys, rows.index, rows.num_rows,
        WIDTH=width, WIDTH_PADDED=next_power_of_two(width), PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return rows


def accept(text: Tensor, state: Tensor, rows: StepRows, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """As in `drafting.py`."""
    samples, width = rows.tokens.shape
    assert tokens.is_contiguous(), "the drawn tokens are contiguous"
    assert logprobs.is_contiguous(), "log-probabilities are contiguous"
    out = torch.empty(2 + 2 * width, samples, dtype=torch.float64, device=text.device)
    _accept[(samples,)](
        text, state, state.stride(0), rows.tokens, rows.num_rows, tokens, logprobs, out, samples,
        WIDTH=width, WIDTH_PADDED=next_power_of_two(width), num_warps=1,
    )  # fmt: skip
    return out
