"""Sampling noise as a pure function of its key: (seed, step, draw, sample, token index, vocabulary index).

A counter-based generator: each number is a 64-bit hash (the finaliser of SplitMix64, Steele et al. 2014) of its key.
There is no state to save or share, and a number does not depend on batch composition or arrival order. Integer
arithmetic that wraps at 64 bits is the same on every device; only the two logarithms at the end may differ in the last
bit of a float64.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.files.digests import blake2_of

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def sequence_key(seed: int, step: int, draw: int, sample: int) -> int:
    """The key of one completion, as a signed 64-bit integer."""
    key = 0
    for part in (seed, step, draw, sample):
        key ^= ((part + 1) * _GOLDEN) & _MASK
        for shift, factor in _ROUNDS:
            key = ((key ^ (key >> shift)) * factor) & _MASK
        key ^= key >> _LAST_SHIFT
    return _signed(key)


def prompt_seed(seed: int, prompt_ids: Sequence[int]) -> int:
    """A seed for one prompt: the turns of a conversation with a constant seed draw different noise."""
    return seed ^ int.from_bytes(blake2_of(array("q", prompt_ids).tobytes(), 8), "little")


def token_keys(sequence_keys: Tensor, token_index: Tensor) -> Tensor:
    """Keys of the tokens at `token_index` of the completions `sequence_keys`; int64 [rows]."""
    return _mix_tensor(sequence_keys ^ ((token_index + 1) * _signed(_GOLDEN)))


def uniform(keys: Tensor, index: Tensor) -> Tensor:
    """One number strictly between 0 and 1 for every key and index; float64, shapes broadcast."""
    bits = _mix_tensor(keys ^ ((index + 1) * _signed(_GOLDEN)))
    # 52 bits plus one half: exact in float64, and never 0 or 1.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel(keys: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel noise: the argmax of logits plus this is a sample of their softmax."""
    return uniform(keys, index).log_().neg_().log_().neg_()


def _mix_tensor(value: Tensor) -> Tensor:
    assert value.dtype == torch.int64
    for shift, factor in _ROUNDS:
        value = (value ^ _shift_right(value, shift)) * _signed(factor)
    return value ^ _shift_right(value, _LAST_SHIFT)


def _shift_right(value: Tensor, shift: int) -> Tensor:
    """Logical right shift: torch has signed integers only, so clear the copies of the sign bit."""
    return (value >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
