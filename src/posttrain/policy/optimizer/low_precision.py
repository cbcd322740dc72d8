"""Numbers in fewer bits: stochastic rounding to bf16, and blocks of 8-bit codes for Adam's two moments.

Rounding to nearest would lose small changes: a decay of 0.1 % per step is less than half of the last bit of a bf16
number. Stochastic rounding, up or down in proportion to the distance, is unbiased. The random bits are a hash of (key,
index of the number), so it does not depend on devices, slices or ranks, and there is no generator whose state would
have to be saved.

The 8-bit codes are our own, in the spirit of block-wise 8-bit Adam (Dettmers et al. 2022), with powers where that paper
has a table: a block shares one fp32 scale, its largest magnitude; the steps between codes are small near zero, where
most numbers are. The first moment is ±scale·(k/127)², the second scale·((k+1)/256)⁴. The second is never stored as zero
in a block that is not all zero: it is a divisor, and too small a value would make a step too large. Values below
2·10⁻¹⁰ of the block's maximum are stored too large instead.

Everything is plain torch; `fused/adam_kernels.py` has the same as parts of a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.files.digests import blake2_of

MAX_BLOCK = 256  # numbers that share a scale
_MIN_BLOCK = 16


def noise_key(*parts: int | str) -> int:
    """A 62-bit key from whatever names a piece of noise."""
    return int.from_bytes(blake2_of("/".join(map(str, parts)), 8), "little") >> 2


def random_words(key: Tensor, index: Tensor) -> Tensor:
    """A word of 32 bits for every index, as int32. `key` is an int64 tensor of one number, as from `noise_key`.

    Products of int32 wrap around, on CPUs and GPUs alike. A GPU has no int64 of its own, and this is most of what an
    update of bf16 state computes.
    """
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    # Indices beyond 2³² differ in their high word, which must not be lost.
    mixed = _mix(index.to(torch.int32) + low + (index >> 32).to(torch.int32) * 0x1B873593)
    return _mix(mixed ^ (high * 0x2C1B3C6D))


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words that scatters (the constants are from Chris Wellons' search, "lowbias32").

    Shifting an int32 repeats its sign: the masks make it a shift of the bits alone.
    """
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ ((word >> 15) & 0x1FFFF)) * 0x735A2D97
    return word ^ ((word >> 15) & 0x1FFFF)


def round_to_bf16(values: Tensor, words: Tensor) -> Tensor:
    """Stochastic rounding from fp32 to bf16; values that bf16 represents exactly, and NaN, are unchanged."""
    # A bf16 is the upper half of an fp32: adding 16 random bits to the lower half carries with the right probability.
    bits = values.view(torch.int32) + (words & 0xFFFF)
    rounded = (bits & -65536).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def block_size(shape: tuple[int, ...]) -> int | None:
    """Numbers per scale for a tensor of this shape; None where 8 bits do not pay.

    Blocks lie within rows, so that they stay whole when rows are spread over ranks.
    """
    if len(shape) < 2 or shape[-1] == 0:
        return None
    columns = shape[-1]
    if columns < _MIN_BLOCK:
        return columns
    return next((size for size in range(min(columns, MAX_BLOCK), _MIN_BLOCK - 1, -1) if columns % size == 0), None)


def encode_first_moment(values: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [n, size] of fp32 as int8 codes and the scales [n]."""
    magnitudes = values.abs()
    scales = magnitudes.amax(dim=-1)
    share = magnitudes / _divisor(scales)
    lower = (share.sqrt() * 127).floor().clamp(0, 126)
    below, above = (lower / 127).square(), ((lower + 1) / 127).square()
    code = lower + (_uniform(words) < (share - below) / (above - below))
    return (code * values.sign()).to(torch.int8), scales


def decode_first_moment(codes: Tensor, scales: Tensor) -> Tensor:
    share = codes.float() / 127
    return share * share.abs() * scales.unsqueeze(-1)


def encode_second_moment(values: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [n, size] of fp32 that are not negative as uint8 codes and the scales [n]."""
    scales = values.amax(dim=-1)
    share = values / _divisor(scales)
    lower = (share.sqrt().sqrt() * 256 - 1).floor().clamp(0, 254)
    below, above = _fourth_power((lower + 1) / 256), _fourth_power((lower + 2) / 256)
    code = lower + (_uniform(words) < (share - below) / (above - below))
    return code.to(torch.uint8), scales


def decode_second_moment(codes: Tensor, scales: Tensor) -> Tensor:
    return _fourth_power((codes.float() + 1) / 256) * scales.unsqueeze(-1)


def _fourth_power(values: Tensor) -> Tensor:
    return values.square().square()


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(-1)


def _uniform(words: Tensor) -> Tensor:
    """In [0, 1), with the 24 bits that fp32 can hold."""
    return ((words >> 8) & 0xFFFFFF).float() * 2.0**-24
