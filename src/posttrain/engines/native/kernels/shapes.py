"""Tile sizes of the attention kernels, and the number of pieces that a sequence is split into. Does not import Triton.

Everything follows from shapes that are fixed when a CUDA graph is captured. The engine times nothing and reads nothing
from the device. `bench/tune_decode_kernels.py` times candidates on a GPU; its results go into `TILES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Minimum positions per program of the split kernel; with fewer, launch overhead dominates.
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
SMALLEST_TILE = 16  # of the tensor cores
# Target number of programs per multiprocessor. Three or four are resident at a time.
_PROGRAMS_PER_SM = 4
# Assumed without a GPU (Triton's interpreter).
_DEFAULT_NUM_SMS = 132


@dataclass(frozen=True)
class AttentionTile:
    """`block` positions of keys and values per iteration of one program."""

    block: int
    num_warps: int
    num_stages: int
    # Softmax weights are rounded to the values' dtype. True: a second product adds the rounding error, so that weights
    # have 16 bits instead of 8 in bf16. Costs tensor core time, which decoding leaves idle, but no memory traffic.
    exact_weights: bool = False


# Bytes of one key or value (padded to a power of two) -> tile. All but one of the stages of keys and values are in
# shared memory (228 KiB on Hopper), of which a program should take a third at most, so that one loads while another
# computes.
TILES: dict[int, AttentionTile] = {
    128: AttentionTile(block=128, num_warps=4, num_stages=3),  # e.g. 64 dims of bf16
    256: AttentionTile(block=64, num_warps=4, num_stages=3),  # 128 dims of bf16
    512: AttentionTile(block=32, num_warps=4, num_stages=3),  # 256 dims of bf16, 128 of fp32
    1024: AttentionTile(block=16, num_warps=4, num_stages=2),  # 256 dims of fp32
}


# For the queries of one sequence, where another tile is faster. On an H200, 64 rows of 1,200 tokens take 76 us instead
# of 92, and 512 rows of 252 tokens 129 us with either.
SINGLE_TILES: dict[int, AttentionTile] = {256: AttentionTile(block=32, num_warps=2, num_stages=4)}

# Pairs of FP8 (`attend_fp8.py`), any dim: fewer warps, each with more unpacking work.
FP8_TILE = AttentionTile(block=64, num_warps=2, num_stages=3)


def attention_tile(padded_dim: int, itemsize: int, tile_rows: int) -> AttentionTile:
    """The tile for keys of `padded_dim` numbers; one program has `tile_rows` queries."""
    row_bytes = min(max(padded_dim * itemsize, min(TILES)), max(TILES))
    tile = FP8_TILE if itemsize == 1 else TILES[row_bytes]
    if itemsize == 2 and tile_rows <= SMALLEST_TILE:
        tile = SINGLE_TILES.get(row_bytes, tile)
    if tile_rows * padded_dim >= 64 * 256 or tile_rows >= 128:
        # The accumulators of a tile this large need the registers of eight warps.
        return AttentionTile(min(tile.block, 64), 8, min(tile.num_stages, 2), tile.exact_weights)
    return tile


def num_splits(num_programs: int, max_tokens: int, num_sms: int) -> int:
    """Pieces per sequence, a power of two, so that `num_programs` unsplit programs over at most `max_tokens` fill the
    GPU.

    Large batches fill the GPU without splits; the reduction pass would only add cost.
    """
    num_programs = max(num_programs, 1)
    wanted = (_PROGRAMS_PER_SM * num_sms + num_programs // 2) // num_programs
    affordable = max_tokens // MIN_SPLIT_TOKENS
    limit = max(1, min(wanted, affordable, MAX_SPLITS))
    return 1 << (limit.bit_length() - 1)


def multiprocessors(device: torch.device) -> int:
    return _num_sms(device.index) if device.type == "cuda" else _DEFAULT_NUM_SMS


@cache
def _num_sms(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1
