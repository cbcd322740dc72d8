"""The ranks that share each layer of a model, and what they exchange: sums, parts side by side, one number.

The ranks of a group compute the same hidden states, losses and norms, bit for bit, as long as an all-reduce gives all
of them the same bits, as those of gloo and NCCL do. So they make the same decisions without communication: they draw
the same tokens from the same keys, and apply the same updates to replicated parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from posttrain.policy.parallel.fsdp import local_part

_MARK = "tensor_group"  # attribute of modules that compute with the group themselves


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer, from the view of this rank."""

    mesh: DeviceMesh  # its axis `tp` alone

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def summed(self, x: Tensor) -> Tensor:
        """In fp32 at least: parts of a sum are not rounded before they are added up. Without autograd."""
        total = x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True)
        return self.sum_in_place(total).to(x.dtype)

    def sum_in_place(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self.group)
        return total

    def copied(self, x: Tensor) -> Tensor:
        """x, whose gradients on the ranks are parts of a sum."""
        return _tensor(_Copied.apply(x, self))

    def added(self, x: Tensor) -> Tensor:
        """The sum over the ranks; each has the gradient of its own part."""
        return _tensor(_Added.apply(x, self))

    def stacked(self, x: Tensor) -> Tensor:
        """[ranks, ...]: x of every rank. Without autograd."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.stack(parts)

    def beside(self, x: Tensor, total: int) -> Tensor:
        """The ranks' columns side by side, `total` of them; each has the gradient of its own."""
        return _tensor(_Beside.apply(x, total, self))

    def first_of(self, total: int) -> int:
        """Of `total` rows or columns the first that this rank has. All but the last ranks have equally many."""
        return self.rank * -(-total // self.size)

    def smallest(self, number: int) -> int:
        """Of every rank's number."""
        lowest = torch.tensor(number, device=self.mesh.device_type)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.group)
        return int(lowest)


def mark(module: nn.Module, group: TensorGroup) -> None:
    setattr(module, _MARK, group)


def group_of(module: nn.Module) -> TensorGroup | None:
    """The group that computes this output head or decoder layer; None: each rank has it whole."""
    found: TensorGroup | None = getattr(module, _MARK, None)
    return found


def local_parameter(module: nn.Module, summed_over: TensorGroup | None = None) -> Tensor:
    """This rank's part of the weight of a module that is not called, whose gradients may be parts of a group's sum."""
    local = local_part(_tensor(module.weight))
    return local if summed_over is None else summed_over.copied(local)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.summed(grads[0]), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, group: TensorGroup) -> Tensor:
        ctx.first, ctx.width = group.first_of(total), x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -(-total // group.size) - x.shape[-1]))
        return torch.cat(list(group.stacked(padded)), dim=-1)[..., :total]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].narrow(-1, ctx.first, ctx.width), None, None


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
