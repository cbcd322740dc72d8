# mypy: disable-error-code="no-untyped-def"
"""The parts of a captured decode step besides the model: one launch at its beginning and one at its end.

In torch these are some sixteen operators on a few hundred numbers each, at about two microseconds an operator: with a
small model a noticeable part of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _places(
    table_ptr, position_ptr, slot_ptr, length_ptr, rows, table_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    position = tl.load(position_ptr + row, mask=there, other=0)
    at = row.to(tl.int64) * table_stride + position // PAGE_SIZE
    page = tl.load(table_ptr + at, mask=there, other=0).to(tl.int64)
    tl.store(slot_ptr + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=there)
    tl.store(length_ptr + row, (position + 1).to(tl.int32), mask=there)


@triton.jit
def _move_on(
    token_ptr, position_ptr, index_ptr, live_ptr, new_token_ptr, logprob_ptr, drawn_ptr, rows, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    live = tl.load(live_ptr + row, mask=there, other=0)
    token = tl.load(new_token_ptr + row, mask=there, other=0)
    logprob = tl.load(logprob_ptr + row, mask=there, other=0.0)
    tl.store(token_ptr + row, token, mask=there)
    tl.store(position_ptr + row, tl.load(position_ptr + row, mask=there, other=0) + live, mask=there)
    tl.store(index_ptr + row, tl.load(index_ptr + row, mask=there, other=0) + live, mask=there)
    tl.store(drawn_ptr + row, token.to(tl.float64), mask=there)
    tl.store(drawn_ptr + rows + row, logprob.to(tl.float64), mask=there)


def places(table: Tensor, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """(slots, int64; lengths, int32) of rows whose pages are in `table` and whose new tokens are at
    `position`, int64.
    """
    rows = len(position)
    assert table.dtype == torch.int32, f"the page table is {table.dtype}, int32 is expected"
    assert table.stride(1) == 1, "the pages of a row must be contiguous"
    assert position.is_contiguous(), "positions must be contiguous"
    slots, lengths = torch.empty_like(position), torch.empty_like(position, dtype=torch.int32)
    if rows:
        _places[(triton.cdiv(rows, _BLOCK),)](
            table, position, slots, lengths, rows, table.stride(0), PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=4
        )
    return slots, lengths


def move_on(
    token: Tensor, position: Tensor, index: Tensor, live: Tensor, new_token: Tensor, logprob: Tensor
) -> Tensor:  # fmt: skip
    """Sets `token` to `new_token` and advances `position` and `index` by `live`. Returns tokens and log-probabilities,
    [2, rows], float64.
    """
    rows = len(token)
    drawn = torch.empty(2, rows, dtype=torch.float64, device=token.device)
    assert all(t.is_contiguous() for t in (token, position, index, live, new_token, logprob)), "rows must be contiguous"
    if rows:
        _move_on[(triton.cdiv(rows, _BLOCK),)](
            token, position, index, live, new_token, logprob, drawn, rows, BLOCK=_BLOCK, num_warps=4
        )
    return drawn
