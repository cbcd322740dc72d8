"""Context parallelism (Ulysses, arXiv:2309.14509): ranks share each packed row in training.

Each rank has a contiguous part of the row's tokens. For attention an all-to-all gives each rank all tokens and a part
of the heads, the input of ordinary attention over packed rows (shared prompts included). A second all-to-all reverts
this. The log-probabilities of response tokens, one number each, are gathered, so every rank computes the loss of the
whole row; its gradients are those of its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from posttrain.errors import InputError
from posttrain.models.attention_interface import AttendOptions, AttentionContext, Place, RecurrenceInputs
from posttrain.policy.packed import PackedRow, RowShare
from posttrain.policy.parallel.tensor_group import exchange

FIELD = "policy.dtensor_cfg.context_parallel_size"


@dataclass(frozen=True)
class RowGroup:
    """The ranks that share each row, from the view of this rank."""

    mesh: DeviceMesh  # its axis `cp` alone

    def own_part(self, row: PackedRow) -> PackedRow:
        """This rank's tokens of the row, padded to equal lengths, and the response tokens that are read from them."""
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        length = -(-row.num_tokens // size)
        first = length * rank
        padding = (0, length * size - row.num_tokens)
        ids, positions = (
            torch.nn.functional.pad(values, padding)[:, first : first + length]
            for values in (row.input_ids, row.position_ids)
        )
        (own,) = torch.where((row.source >= first) & (row.source < first + length))
        return replace(
            row,
            input_ids=ids,
            position_ids=positions,
            source=row.source[own] - first,
            targets=row.targets[own],
            last=torch.where(torch.isin(own, row.last))[0],
            attention=SharedAttention(row.attention, self.mesh.get_group(), size, row.num_tokens),
            share=RowShare(own, len(row.source), self.mesh.get_group()),
        )


class SharedAttention:
    """`AttentionContext` of ranks that each have a part of the row."""

    def __init__(self, whole: AttentionContext, group: dist.ProcessGroup, size: int, num_tokens: int) -> None:
        self.whole, self.group, self.size, self.num_tokens = whole, group, size, num_tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]) -> Tensor:
        if key.shape[1] % self.size:
            raise InputError(
                f"{FIELD} = {self.size} does not divide the {key.shape[1]} key-value heads that a rank has: each takes "
                "an equal part of them"
            )
        # [own tokens, heads, dim] -> [all tokens, own heads, dim], and back
        parts = (x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in (query, key, value))
        rows = [exchange(part, self.group).flatten(0, 1)[: self.num_tokens] for part in parts]
        if "sinks" in options:  # of this rank's heads
            options["sinks"] = options["sinks"].unflatten(0, (self.size, -1))[dist.get_rank(self.group)]
        out = self.whole.attend(layer, *rows, **options)
        padding = out.new_zeros(len(query) * self.size - self.num_tokens, *out.shape[1:])
        all_tokens = torch.cat([out, padding]).unflatten(0, (self.size, -1))
        return exchange(all_tokens, self.group).transpose(0, 1).flatten(1, 2)

    def convolve(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        raise InputError(f"{FIELD} = {self.size}: layer {place[0]} is recurrent, and its sequences cannot be split")

    def recur(self, place: Place, *inputs: *RecurrenceInputs, unit: bool = False) -> Tensor:
        raise AssertionError("a convolution comes before")
