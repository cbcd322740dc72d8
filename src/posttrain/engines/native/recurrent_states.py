"""States of recurrent layers, one slot for each sequence and each prompt that samples still have to start from.

`scheduler.py` gives the slots to sequences. The last slot is for the padding of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engines.native.kv_cache import zeros
from posttrain.models.attention_interface import Place, RecurrenceInputs
from posttrain.models.tensor_files import TensorFacts
from posttrain.policy.recurrence import (
    PackedRecurrence,
    RowPiece,
    convolution_step,
    in_exact_types,
    recurrence_step,
)
from posttrain.policy.runtime import to_device, triton_kernels

NUM_PROMPT_SLOTS = 8  # beside one for each sample of a batch: prompts whose samples have not all started


class RecurrentStates:
    def __init__(self, shapes: dict[Place, TensorFacts], num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self.pools = {
            place: zeros((num_slots + 1, *shape.shape), shape.dtype, device) for place, shape in shapes.items()
        }

    @property
    def scratch_slot(self) -> int:
        return self.num_slots

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            source, target = to_device(torch.tensor(copies, dtype=torch.long).T.contiguous(), self.device)
            for pool in self.pools.values():
                pool.index_copy_(0, target, pool.index_select(0, source))


class PrefillRecurrence:
    """Packed pieces of sequences: each starts from zeros or from the state in its slot, where its end leaves one."""

    def __init__(self, states: RecurrentStates, pieces: Sequence[tuple[RowPiece, int, bool]]) -> None:
        """Each piece with its slot and whether it is the first of its sequence."""
        self.states = states
        device = states.device
        self.packed = PackedRecurrence([piece for piece, _, _ in pieces], device)
        self.slots = to_device(torch.tensor([slot for _, slot, _ in pieces]), device)
        first = torch.tensor([is_first for _, _, is_first in pieces])
        self.continues = None if bool(first.all()) else to_device(~first, device)

    def _before(self, place: Place) -> Tensor | None:
        if self.continues is None:
            return None
        held = self.states.pools[place].index_select(0, self.slots)
        return torch.where(self.continues.view(-1, *[1] * (held.dim() - 1)), held, 0)

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        before, pool = self._before(place), self.states.pools[place]
        pool.index_copy_(0, self.slots, self.packed.last_tokens(x, weight.shape[1], before).to(pool.dtype))
        return self.packed.convolve(x, weight, bias, before, silu=silu)

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        out, after = self.packed.recur(*inputs, self._before(place), unit=unit)
        self.states.pools[place].index_copy_(0, self.slots, after)
        return out


class DecodeRecurrence:
    """One token each of the sequences in `slots`, whose states it advances."""

    def __init__(self, states: RecurrentStates, slots: Tensor) -> None:
        self.states = states
        self.slots = slots
        self.kernels = triton_kernels("engines.native.kernels") if states.device.type == "cuda" else None

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        pool = self.states.pools[place]
        kernels = None if pool.dtype == torch.float64 else self.kernels
        if kernels is not None and kernels.convolution_fits(pool, x, weight, bias, silu=silu):
            return kernels.convolution_step(pool, self.slots, x, weight, bias, silu=silu)
        out, after = convolution_step(pool.index_select(0, self.slots), x, weight, bias)
        pool.index_copy_(0, self.slots, after)
        return F.silu(out) if silu else out

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        pool = self.states.pools[place]
        kernels = self.kernels if pool.dtype == torch.float32 else None
        if kernels is not None and kernels.recurrence_fits(pool, *inputs, unit=unit):
            return kernels.recurrence_step(pool, self.slots, *inputs, unit=unit)
        query, key, value, log_decay, beta = in_exact_types(*inputs, unit=unit)
        out, after = recurrence_step(pool.index_select(0, self.slots), query, key, value, log_decay, beta)
        pool.index_copy_(0, self.slots, after)
        return out
