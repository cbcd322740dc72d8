"""Attention of one new token per sequence over its pages.

One program per sequence, key head and piece of the sequence. The query heads that share a key head are the rows of a
small matrix product, so each page is read once. Small batches cut their sequences into pieces to occupy the whole GPU
(flash-decoding, Dao et al. 2023); a second kernel combines the pieces, always in the same order. Positions before a
sliding window are skipped. The number of pieces affects results by rounding only, and depends on shapes only.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from posttrain.engines.native.kernels.attend import combine_pieces_kernel, paged_attention_kernel
from posttrain.engines.native.kernels.shapes import (
    MIN_SPLIT_TOKENS,
    SMALLEST_TILE,
    AttentionTile,
    attention_tile,
    multiprocessors,
    next_power_of_two,
    num_splits,
)

_MAX_HEAD_DIM = 256
_MAX_GROUP = 128
_LOG2_E = math.log2(math.e)
# Scales of FP8 keys and values, [pages, page size, kv heads] each, float32.
Factors = tuple[Tensor, Tensor]


def supports(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the attention kernels support these tensors: device, dtypes and shapes."""
    heads, kv_heads = query.shape[1], keys.shape[2]
    # Keys and values in FP8 are read two numbers at a time.
    fits_fp8 = keys.dtype == torch.float8_e4m3fn and keys.shape[-1] % 2 == 0 and values.shape[-1] % 2 == 0
    return (
        runs_here(query)
        and keys.dtype == values.dtype
        and (keys.dtype == query.dtype or fits_fp8)
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and query.shape[-1] == keys.shape[-1]
        and keys.shape[:3] == values.shape[:3]
        and max(keys.shape[-1], values.shape[-1]) <= _MAX_HEAD_DIM
        and heads % kv_heads == 0
        and heads // kv_heads <= _MAX_GROUP
        and query.stride(-1) == 1
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def runs_here(tensor: Tensor) -> bool:
    """True on CUDA devices; elsewhere only in Triton's interpreter (TRITON_INTERPRET=1), which tests use."""
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def paged_attention(
    query: Tensor,  # [rows, heads, dim]; may be a view of a wider product, the last dim contiguous
    keys: Tensor,  # [pages, page size, kv heads, dim]
    values: Tensor,  # [pages, page size, kv heads, value dim]
    table: Tensor,  # [rows, most pages], int32
    lengths: Tensor,  # [rows], int32: tokens of each row, the new one included; 0 gives zeros
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,  # [heads]: a logit of each in the denominator, read where they are
    factors: Factors | None = None,
    out: Tensor | None = None,  # [rows, heads, value dim], contiguous
    tile: AttentionTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """`tile` and `splits` are for tuning; by default they follow from the shapes."""
    assert supports(query, keys, values), "the caller has asked supports()"
    rows, heads, dim = query.shape
    page_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    out = output_like(query, value_dim, out)
    if rows == 0:
        return out
    group = heads // kv_heads
    padded = max(next_power_of_two(max(dim, value_dim)), SMALLEST_TILE)
    tile = tile or attention_tile(padded, keys.element_size(), max(next_power_of_two(group), SMALLEST_TILE))
    if splits is None:
        longest = min(table.shape[1] * page_size, window or math.inf)
        splits = num_splits(rows * kv_heads, int(longest), multiprocessors(query.device))
    pieces, sums = piece_buffers(out, splits, 0)
    attend_to_own(
        query, keys, values, factors, table, lengths, None, out, pieces, sums, scale=scale, window=window,
        softcap=softcap, sinks=sinks, tile=tile, splits=splits, prefix_splits=0, prefix_block=1,
    )  # fmt: skip
    return out


def output_like(query: Tensor, value_dim: int, out: Tensor | None) -> Tensor:
    shape = (query.shape[0], query.shape[1], value_dim)
    if out is None:
        return torch.empty(shape, dtype=query.dtype, device=query.device)
    assert out.shape == shape, f"the output has shape {tuple(out.shape)}, {shape} was computed"
    assert out.is_contiguous(), "the output is written as a block"
    return out


def piece_buffers(out: Tensor, splits: int, prefix_splits: int) -> tuple[Tensor, Tensor]:
    """Buffers for the pieces of every row and head, and for log2 of their sums; `out`, which is then unused, if nothing
    is split.
    """
    num_slots = num_slots_of(splits, prefix_splits)
    if num_slots == 0:
        return out, out
    rows, heads, value_dim = out.shape
    pieces = torch.empty((rows, heads, num_slots, value_dim), dtype=torch.float32, device=out.device)
    return pieces, torch.empty((rows, heads, num_slots), dtype=torch.float32, device=out.device)


def num_slots_of(splits: int, prefix_splits: int) -> int:
    """An unsplit sequence needs no slot: its program writes the output."""
    return prefix_splits + (splits if splits > 1 else 0)


def score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factors of the query-key product, inside and outside of the soft cap, including log2(e)."""
    if softcap is None:
        return scale * _LOG2_E, 1.0
    return 2.0 * scale / softcap, softcap * _LOG2_E


def attend_to_own(
    query: Tensor, keys: Tensor, values: Tensor, factors: Factors | None, table: Tensor, lengths: Tensor,
    starts: Tensor | None, out: Tensor, pieces: Tensor, sums: Tensor, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None, tile: AttentionTile,
    splits: int, prefix_splits: int, prefix_block: int,
) -> None:  # fmt: skip
    """Attention of each row from its start on (None: 0), combined with the prefix results in `pieces`."""
    rows, heads, dim = query.shape
    page_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    check_indices(table, lengths)
    inner, outer = score_scales(scale, softcap)
    group, window_or_0 = heads // kv_heads, 0 if window is None else window
    starts_or_any, has_start = (lengths, False) if starts is None else (starts, True)
    sinks_or_any = lengths if sinks is None else sinks
    assert sinks is None or (sinks.shape == (heads,) and sinks.is_contiguous()), "a sink for each head"
    slots = num_slots_of(splits, prefix_splits)
    paged_attention_kernel[(kv_heads, rows, splits)](
        query, *as_read(keys, values, factors), out, pieces, sums, table, lengths, starts_or_any,
        sinks_or_any, inner, outer, window_or_0, query.stride(0), query.stride(1), table.stride(0),
        splits, slots, prefix_splits,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PADDED=max(next_power_of_two(group), SMALLEST_TILE),
        KEY_DIM=dim, KEY_PADDED=padded_dim(dim, factors),
        VALUE_DIM=value_dim, VALUE_PADDED=padded_dim(value_dim, factors),
        PAGE_SIZE=page_size, BLOCK=tile.block, MIN_TOKENS=MIN_SPLIT_TOKENS,
        PREFIX_BLOCK=prefix_block, IS_SPLIT=splits > 1, HAS_START=has_start, HAS_SINKS=sinks is not None,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, FP8=factors is not None,
        IN_ASSEMBLY=not triton.knobs.runtime.interpret, EXACT_WEIGHTS=exact_weights(tile, query),
        PRECISION=dot_precision(query), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_pieces_kernel[(heads, rows)](
            out, pieces, sums, lengths, starts_or_any, sinks_or_any, window_or_0, splits, slots, prefix_splits,
            VALUE_DIM=value_dim, VALUE_PADDED=next_power_of_two(value_dim),
            SLOTS_PADDED=max(8, next_power_of_two(slots)),
            PREFIX_BLOCK=prefix_block, BLOCK=tile.block, MIN_TOKENS=MIN_SPLIT_TOKENS,
            HAS_START=has_start, HAS_SINKS=sinks is not None, HAS_WINDOW=window is not None,
            num_warps=4 if slots > 8 else 1, num_stages=1,
        )  # fmt: skip


def factors_or_any(keys: Tensor, factors: Factors | None) -> Factors:
    """The scales, or a placeholder that the kernels do not read if keys and values are not quantised."""
    assert (factors is not None) == (keys.dtype == torch.float8_e4m3fn), "keys and values in FP8 have factors"
    return (keys, keys) if factors is None else factors


def as_read(keys: Tensor, values: Tensor, factors: Factors | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pools and scales in the format of the attention kernels: pairs of FP8 as 16-bit words."""
    first, second = factors_or_any(keys, factors)
    if factors is None:
        return keys, values, first, second
    return keys.view(torch.uint16), values.view(torch.uint16), first, second


def padded_dim(dim: int, factors: Factors | None) -> int:
    """A power of two; with FP8 the even and the odd dims are a tile each."""
    return max(next_power_of_two(dim), SMALLEST_TILE if factors is None else 2 * SMALLEST_TILE)


def check_indices(table: Tensor, lengths: Tensor) -> None:
    assert table.dtype == torch.int32, f"the page table is {table.dtype}, int32 is expected"
    assert lengths.dtype == torch.int32, f"lengths are {lengths.dtype}, int32 is expected"
    assert table.stride(1) == 1, "the pages of a row must be contiguous"
    assert lengths.stride(0) == 1, "lengths must be contiguous"


def exact_weights(tile: AttentionTile, query: Tensor) -> bool:
    return tile.exact_weights and query.dtype != torch.float32


def dot_precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"
