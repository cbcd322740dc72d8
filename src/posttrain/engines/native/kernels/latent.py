"""Attention of one new token per sequence over pages of latent vectors: one key head for all query heads, whose values
are the first numbers of its keys (`policy/latent.py`).

As `paged_attention`, with two differences. A key is read as two tiles, the latent vector and the rotated numbers, whose
widths are padded on their own: 512 + 64, where one tile of 576 would take 1,024. The first tile is the values too, so
it is read once. A program has some of the query heads; the others of a sequence read the same pages at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.engines.native.kernels.attend import _accumulate, _piece, combine_pieces_kernel
from posttrain.engines.native.kernels.paged import check_indices, dot_precision, output_like, piece_buffers
from posttrain.engines.native.kernels.shapes import (
    MIN_SPLIT_TOKENS,
    SMALLEST_TILE,
    multiprocessors,
    next_power_of_two,
    num_splits,
)
from posttrain.policy.fused.kernel_trials import Comparison, Trial

_MAX_RANK, _MAX_ROTATED = 512, 64
_BLOCK = 32  # positions of an iteration
_MAX_SPLITS = 32  # the pieces of a head are put together in registers
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["table_stride", "splits", "slots"])
def latent_attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [rows, HEADS, RANK + ROTATED]
    key_ptr,  # [pages, PAGE_SIZE, RANK + ROTATED]
    out_ptr,  # [rows, HEADS, RANK]; unused if IS_SPLIT
    piece_ptr,  # [rows, HEADS, slots, RANK], float32
    piece_sum_ptr,  # [rows, HEADS, slots], float32: log2 of the sum of a piece
    table_ptr,  # [rows, most pages], int32
    length_ptr,  # [rows], int32
    scale,
    table_stride,
    splits,
    slots,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # splits > 1
    PRECISION: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    low, high, _ = _piece(0, tl.load(length_ptr + row), split, splits, BLOCK, MIN_TOKENS)
    if IS_SPLIT:  # noqa: SIM102  (one is compile-time, the other run-time)
        if low >= high:
            return

    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    present = (heads < HEADS)[:, None]
    c = tl.arange(0, RANK_PADDED)
    r = tl.arange(0, ROTATED_PADDED)
    j = tl.arange(0, BLOCK)
    at_head = row * HEADS + heads
    at_query = (at_head * (RANK + ROTATED))[:, None]
    query = tl.load(query_ptr + at_query + c[None, :], mask=present & (c < RANK)[None, :], other=0.0)
    turned = tl.load(query_ptr + at_query + (RANK + r)[None, :], mask=present & (r < ROTATED)[None, :], other=0.0)
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, RANK_PADDED], tl.float32)
    table_row = table_ptr + row * table_stride
    page = tl.load(table_row + (low + j) // PAGE_SIZE, mask=low + j < high, other=0)  # one block ahead
    for begin in range(low, high, BLOCK):
        position = begin + j
        visible = position < high
        at_key = ((page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE) * (RANK + ROTATED))[:, None]
        latent = tl.load(key_ptr + at_key + c[None, :], mask=visible[:, None] & (c < RANK)[None, :], other=0.0)
        keys = tl.load(
            key_ptr + at_key + (RANK + r)[None, :], mask=visible[:, None] & (r < ROTATED)[None, :], other=0.0
        )
        scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision=PRECISION) * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        best, total, acc = _accumulate(scores, latent, best, total, acc, False, PRECISION)
        ahead = position + BLOCK
        page = tl.load(table_row + ahead // PAGE_SIZE, mask=ahead < high, other=0)
    nothing = total == 0.0  # a row without positions gets zeros
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    out_mask = present & (c < RANK)[None, :]
    if IS_SPLIT:
        at_slot = at_head * slots + split
        tl.store(piece_ptr + at_slot[:, None] * RANK + c[None, :], acc, mask=out_mask)
        tl.store(piece_sum_ptr + at_slot, tl.where(nothing, float("-inf"), best + tl.log2(total)), mask=heads < HEADS)
    else:
        tl.store(out_ptr + at_head[:, None] * RANK + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def latent_attention(
    query: Tensor,  # [rows, heads, rank + rotated], contiguous
    keys: Tensor,  # [pages, page size, 1, rank + rotated], contiguous
    rank: int,
    table: Tensor,  # [rows, most pages], int32
    lengths: Tensor,  # [rows], int32: tokens of each row, the new one included; 0 gives zeros
    *,
    scale: float,
    out: Tensor | None = None,  # [rows, heads, rank], contiguous
    splits: int | None = None,
) -> Tensor:
    """[rows, heads, rank]. `splits` is for tests; by default it follows from the shapes."""
    assert query.is_contiguous(), "queries are read as a block"
    assert keys.is_contiguous(), "keys are read as a block"
    check_indices(table, lengths)
    rows, heads, width = query.shape
    out = output_like(query, rank, out)
    if rows == 0:
        return out
    # The sums of 16 heads take 64 registers of a thread of four warps.
    block_heads = SMALLEST_TILE if heads <= SMALLEST_TILE else 2 * SMALLEST_TILE
    head_blocks = triton.cdiv(heads, block_heads)
    if splits is None:
        longest = table.shape[1] * keys.shape[1]
        splits = min(num_splits(rows * head_blocks, longest, multiprocessors(query.device)), _MAX_SPLITS)
    pieces, sums = piece_buffers(out, splits, 0)
    slots = splits if splits > 1 else 0
    latent_attention_kernel[(head_blocks, rows, splits)](
        query, keys, out, pieces, sums, table, lengths, scale * _LOG2_E, table.stride(0), splits, slots,
        HEADS=heads, BLOCK_HEADS=block_heads, RANK=rank, RANK_PADDED=max(next_power_of_two(rank), SMALLEST_TILE),
        ROTATED=width - rank, ROTATED_PADDED=max(next_power_of_two(width - rank), SMALLEST_TILE),
        PAGE_SIZE=keys.shape[1], BLOCK=_BLOCK, MIN_TOKENS=MIN_SPLIT_TOKENS, IS_SPLIT=splits > 1,
        PRECISION=dot_precision(query), num_warps=4 * block_heads // SMALLEST_TILE, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine_pieces_kernel[(heads, rows)](
            out, pieces, sums, lengths, lengths, lengths, 0, splits, slots, 0,
            VALUE_DIM=rank, VALUE_PADDED=next_power_of_two(rank), SLOTS_PADDED=max(8, next_power_of_two(slots)),
            PREFIX_BLOCK=1, BLOCK=_BLOCK, MIN_TOKENS=MIN_SPLIT_TOKENS, HAS_START=False, HAS_SINKS=False,
            HAS_WINDOW=False, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def latent_fits(device: torch.device, dtype: torch.dtype, heads: int, rank: int, width: int, page_size: int) -> bool:
    """Whether the kernel takes latent vectors of these sizes, and computes what torch does on this GPU."""
    sizes_fit = rank <= _MAX_RANK and width - rank <= _MAX_ROTATED and rank % 16 == width % 16 == 0 < width - rank
    if not (sizes_fit and dtype in (torch.bfloat16, torch.float16)):
        return False
    return TRIAL.passes(device, dtype, heads=heads, rank=rank, width=width, page_size=page_size)


def _comparisons(
    device: torch.device, dtype: torch.dtype, *, heads: int, rank: int, width: int, page_size: int
) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    rows, longest = (1, 2 * MIN_SPLIT_TOKENS + 1, 7 * MIN_SPLIT_TOKENS // 2), 7 * MIN_SPLIT_TOKENS // 2
    pages = triton.cdiv(longest, page_size)
    table = torch.randperm(len(rows) * pages, generator=generator).int().view(len(rows), pages)
    query = torch.randn(len(rows), heads, width, generator=generator)
    keys = torch.randn(len(rows) * pages, page_size, 1, width, generator=generator)
    scale = width**-0.5

    def reference(query: Tensor, keys: Tensor) -> tuple[Tensor]:
        found = []
        for row, length in enumerate(rows):
            own = keys[table[row].long()].flatten(0, 2)[:length]
            found.append((query[row] @ own.T * scale).softmax(-1) @ own[:, :rank])
        return (torch.stack(found),)

    for splits in (1, 8, 16, _MAX_SPLITS):  # each compiles a combination of its own

        def kernels(query: Tensor, keys: Tensor, splits: int = splits) -> tuple[Tensor]:
            places = table.to(query.device), torch.tensor(rows, dtype=torch.int32, device=query.device)
            return (latent_attention(query, keys, rank, *places, scale=scale, splits=splits),)

        yield Comparison(kernels, reference, [query.to(dtype), keys.to(dtype)])


TRIAL = Trial("decode steps of latent attention", _comparisons)
