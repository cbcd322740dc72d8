"""Attention where samples of a group share the pages of their prompt: the shared part is read once for many samples.

A sequence has two parts: positions shared by several rows, and the row's own positions. For the shared part, up to
`samples_per_tile` rows of a group with all their heads are the rows of one matrix product against the shared pages
(Hydragen, Juravsky et al. 2024; "cascade" in FlashInfer). For the row's own part, the kernel of `paged.py` begins at
the row's `start` and combines both parts by their sums.

Three small tensors of fixed size (`PrefixTiles`) describe which rows share what, so a captured graph stays valid when
samples leave, join or move. A row that shares nothing has start 0 and is in no tile; an unused tile has length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from posttrain.engines.native.kernels.attend import shared_prefix_kernel
from posttrain.engines.native.kernels.paged import (
    Factors,
    as_read,
    attend_to_own,
    check_indices,
    dot_precision,
    exact_weights,
    num_slots_of,
    output_like,
    padded_dim,
    piece_buffers,
    score_scales,
    supports,
)
from posttrain.engines.native.kernels.shapes import (
    MIN_SPLIT_TOKENS,
    SMALLEST_TILE,
    AttentionTile,
    attention_tile,
    multiprocessors,
    next_power_of_two,
    num_splits,
)

# Queries (samples times heads of a group) in one tile. float32 has no matrix units and needs more registers.
MAX_TILE_QUERIES = 128
MAX_TILE_QUERIES_FP32 = 32


@dataclass(frozen=True)
class PrefixTiles:
    """Which rows share how many positions. Filled on the host by `plan`; on the device three int32 tensors of equal
    shapes.
    """

    starts: Tensor  # [rows]: positions of the row that its tile reads; 0 if it is in none
    tile_rows: Tensor  # [tiles, samples per tile]: rows, -1 after the last
    tile_lengths: Tensor  # [tiles]: shared positions, 0 for an unused tile
    min_rows: int  # smaller groups get no tile: each row reads its pages

    @classmethod
    def empty(
        cls, max_rows: int, samples: int, min_rows: int = 4, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> PrefixTiles:
        """Tiles for any plan of `max_rows` rows, with `samples` to a tile (`samples_per_tile`)."""
        num_tiles = max(1, max_rows // min_rows)
        starts, rows, lengths = (
            torch.zeros(shape, dtype=torch.int32, device=device, pin_memory=pinned)
            for shape in ((max_rows,), (num_tiles, samples), (num_tiles,))
        )
        return cls(starts, rows, lengths, min_rows)

    def plan(self, groups: Sequence[Sequence[int]], shared_tokens: Sequence[int]) -> int:
        """Enter `groups` of rows that share their first `shared_tokens`; returns the number of tiles in use. On the
        host.

        Groups that are too small or share nothing get no tile: with `starts` 0 their rows are read separately.
        """
        starts, rows, lengths = (x.numpy() for x in (self.starts, self.tile_rows, self.tile_lengths))
        starts[:] = 0
        lengths[:] = 0
        rows[:] = -1
        used = 0
        for members, length in zip(groups, shared_tokens, strict=True):
            if length == 0:
                continue
            for begin in range(0, len(members), rows.shape[1]):
                part = members[begin : begin + rows.shape[1]]
                if len(part) < self.min_rows:
                    continue
                rows[used, : len(part)] = part
                lengths[used] = length
                starts[np.asarray(part)] = length
                used += 1
        return used

    def copy_(self, other: PrefixTiles) -> None:
        for mine, theirs in zip(
            (self.starts, self.tile_rows, self.tile_lengths),
            (other.starts, other.tile_rows, other.tile_lengths),
            strict=True,
        ):
            mine.copy_(theirs, non_blocking=True)


def samples_per_tile(heads_per_kv_head: int, itemsize: int, largest_group: int = 64) -> int:
    """A power of two: enough for the largest group, and so that the queries of a tile fit the registers."""
    most = max(1, (MAX_TILE_QUERIES if itemsize <= 2 else MAX_TILE_QUERIES_FP32) // heads_per_kv_head)
    return min(next_power_of_two(largest_group), 1 << (most.bit_length() - 1))


def shared_prefix_attention(
    query: Tensor,  # [rows, heads, dim]
    keys: Tensor,  # [pages, page size, kv heads, dim]
    values: Tensor,
    table: Tensor,  # [rows, most pages], int32
    lengths: Tensor,  # [rows], int32: tokens of each row, the new one included
    shared: PrefixTiles,  # on the device; of a larger batch, too
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    factors: Factors | None = None,
    out: Tensor | None = None,
    tile: AttentionTile | None = None,
    prefix_tile: AttentionTile | None = None,
    splits: int | None = None,
    prefix_splits: int | None = None,
) -> Tensor:
    """What `paged_attention` computes, up to rounding. The arguments from `tile` on are for tuning."""
    assert supports(query, keys, values), "the caller has asked supports()"
    rows, heads, dim = query.shape
    page_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group, samples = heads // kv_heads, shared.tile_rows.shape[1]
    queries = max(next_power_of_two(samples * group), SMALLEST_TILE)
    assert shared.tile_rows.is_contiguous(), "tiles must be contiguous"
    out = output_like(query, value_dim, out)
    if rows == 0:
        return out
    padded = max(next_power_of_two(max(dim, value_dim)), SMALLEST_TILE)
    itemsize, max_tokens, sms = keys.element_size(), table.shape[1] * page_size, multiprocessors(query.device)
    tile = tile or attention_tile(padded, itemsize, max(next_power_of_two(group), SMALLEST_TILE))
    prefix_tile = prefix_tile or attention_tile(padded, itemsize, queries)
    splits = splits or num_splits(rows * kv_heads, max_tokens, sms)
    # The number of tiles if all are full; unused programs exit immediately.
    prefix_splits = prefix_splits or num_splits(-(-rows // samples) * kv_heads, max_tokens, sms)
    pieces, sums = piece_buffers(out, splits, prefix_splits)
    _attend_to_shared(
        query, keys, values, factors, table, lengths, shared, pieces, sums, scale=scale, window=window, softcap=softcap,
        tile=prefix_tile, splits=prefix_splits, num_slots=num_slots_of(splits, prefix_splits),
    )  # fmt: skip
    attend_to_own(
        query, keys, values, factors, table, lengths, shared.starts, out, pieces, sums, scale=scale, window=window,
        softcap=softcap, sinks=sinks, tile=tile, splits=splits, prefix_splits=prefix_splits,
        prefix_block=prefix_tile.block,
    )  # fmt: skip
    return out


def _attend_to_shared(
    query: Tensor, keys: Tensor, values: Tensor, factors: Factors | None, table: Tensor, lengths: Tensor,
    shared: PrefixTiles, pieces: Tensor, sums: Tensor, *, scale: float, window: int | None, softcap: float | None,
    tile: AttentionTile, splits: int, num_slots: int,
) -> None:  # fmt: skip
    _, heads, dim = query.shape
    page_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    check_indices(table, lengths)
    group, samples = heads // kv_heads, shared.tile_rows.shape[1]
    inner, outer = score_scales(scale, softcap)
    shared_prefix_kernel[(kv_heads, len(shared.tile_rows), splits)](
        query, *as_read(keys, values, factors), pieces, sums, table, lengths, shared.tile_rows,
        shared.tile_lengths,
        inner, outer, 0 if window is None else window, query.stride(0), query.stride(1), table.stride(0), splits,
        num_slots, KV_HEADS=kv_heads, GROUP=group, SAMPLES=samples,
        QUERIES_PADDED=max(next_power_of_two(samples * group), SMALLEST_TILE),
        KEY_DIM=dim, KEY_PADDED=padded_dim(dim, factors),
        VALUE_DIM=value_dim, VALUE_PADDED=padded_dim(value_dim, factors),
        PAGE_SIZE=page_size, BLOCK=tile.block, MIN_TOKENS=MIN_SPLIT_TOKENS,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, FP8=factors is not None,
        IN_ASSEMBLY=not triton.knobs.runtime.interpret, EXACT_WEIGHTS=exact_weights(tile, query),
        PRECISION=dot_precision(query), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


# -- when it pays ------------------------------------------------------------------------------------------------------

# Cost of one more launch inside a captured graph.
_EXTRA_LAUNCH_S = 2.5e-6
# Adjacent rows of a group read the same pages at the same time, mostly from the L2 cache. Cost of a byte from there,
# relative to a byte from memory.
_COST_OF_L2_BYTE = 0.6
# In FP8: 512 rows in groups of 32 with prompts of 128 tokens take 11.4 ms a step where each row reads its prompt, and
# 11.7 where no two rows have a prompt in common. So there is little to save.
_COST_OF_L2_BYTE_FP8 = 0.15


@dataclass(frozen=True)
class DecodeShape:
    """One attention layer, and the device's memory bandwidth: by default the copy bandwidth of an H200."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int = 2
    bytes_per_s: float = 4.29e12

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.itemsize


def shared_prefix_pays(
    shape: DecodeShape, group_sizes: Sequence[int], shared_tokens: Sequence[int], min_rows: int = 4
) -> bool:
    """Whether reading shared pages once per tile is faster than once per row: a model of the bytes that are moved.

    Per row the shared tokens come once from memory and then from L2; per tile the same with tiles in place of rows, and
    the piece of every row and head is written and read once in float32. For a batch with rows of many lengths pass the
    expected ones, and decide before the graph is captured: the choice is part of it.
    """
    samples = samples_per_tile(shape.heads // shape.kv_heads, shape.itemsize, max(group_sizes, default=1))
    cost = _COST_OF_L2_BYTE if shape.itemsize > 1 else _COST_OF_L2_BYTE_FP8
    saved = spent = 0.0
    for size, tokens in zip(group_sizes, shared_tokens, strict=True):
        if size < min_rows or tokens == 0:
            continue
        saved += (size - -(-size // samples)) * tokens * shape.kv_bytes_per_token * cost
        spent += size * shape.heads * (shape.value_dim + 1) * 4 * 2
    return (saved - spent) / shape.bytes_per_s > _EXTRA_LAUNCH_S
