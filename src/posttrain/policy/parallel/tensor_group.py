"""The ranks that share each layer of a model, and what they exchange: sums, parts side by side, one number.

The ranks of a group compute the same hidden states, losses and norms, bit for bit, as long as an all-reduce gives all
of them the same bits, as those of gloo and NCCL do. So they make the same decisions without communication: they draw
the same tokens from the same keys, and apply the same updates to replicated parameters.

With `policy.dtensor_cfg.sequence_parallel` (arXiv:2205.05198), passes of training split the residual stream: between
attention and MLP each rank has a stretch of the row's tokens (`split_rows`). An all-gather takes the place of the copy
before projections by columns, a reduce-scatter that of the sum after projections by rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from posttrain.policy.autograd import Context
from posttrain.policy.parallel.fsdp import local_part

_MARK = "tensor_group"  # attribute of modules that compute with the group themselves


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer, from the view of this rank."""

    mesh: DeviceMesh  # its axis `tp` alone
    _tokens: list[int] = field(default_factory=list, compare=False)  # of the row that is split now

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

    # -- rows of which each rank has a stretch ----------------------------------------------------------------------

    @contextmanager
    def split_rows(self, num_tokens: int) -> Iterator[None]:
        """Inside, each rank has a stretch of the row's tokens wherever no heads and no MLP are shared."""
        self._tokens.append(num_tokens)
        try:
            yield
        finally:
            self._tokens.pop()

    @property
    def splits_rows(self) -> bool:
        return bool(self._tokens)

    def own_rows(self, whole: Tensor) -> Tensor:
        """Of [..., tokens, hidden], padded to equal stretches. Without autograd."""
        return self._padded(whole).chunk(self.size, dim=-2)[self.rank].contiguous()

    def own_rows_of_sum(self, part: Tensor) -> Tensor:
        """Of the sum over the ranks, in the type of `part`. Without autograd."""
        stretches = [stretch.contiguous() for stretch in self._padded(part).chunk(self.size, dim=-2)]
        own = torch.empty_like(stretches[0])
        dist.reduce_scatter(own, stretches, group=self.group)
        return own

    def all_rows(self, own: Tensor) -> Tensor:
        """Every rank's stretch, one after another. Without autograd."""
        return torch.cat(list(self.stacked(own)), dim=-2)[..., : self._tokens[-1], :]

    def _padded(self, whole: Tensor) -> Tensor:
        return torch.nn.functional.pad(whole, (0, 0, 0, -whole.shape[-2] % self.size))

    def entering(self, x: Tensor) -> Tensor:
        """The input of projections by columns, whose gradients on the ranks are parts of a sum."""
        return _tensor(_AllRows.apply(x, self, True)) if self.splits_rows else self.copied(x)

    def joined_rows(self, x: Tensor) -> Tensor:
        """All rows of the last hidden states, whose gradients are the same on all ranks."""
        return _tensor(_AllRows.apply(x, self, False)) if self.splits_rows else x

    def copied(self, x: Tensor) -> Tensor:
        """x, whose gradients on the ranks are parts of a sum."""
        return _tensor(_Copied.apply(x, self))

    def added(self, x: Tensor) -> Tensor:
        """The sum over the ranks, or this rank's rows of it; each has the gradient of its own part."""
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
    return getattr(module, _MARK, None)


def local_parameter(module: nn.Module, summed_over: TensorGroup | None = None) -> Tensor:
    """This rank's part of the weight of a module that is not called, whose gradients may be parts of a group's sum."""
    local = local_part(_tensor(module.weight))
    return local if summed_over is None else summed_over.copied(local)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.summed(grads[0]), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if group.splits_rows:
            return group.own_rows_of_sum(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        return group.summed(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_rows(grads[0]) if ctx.group.splits_rows else grads[0], None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: TensorGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        return group.all_rows(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = grads[0]
        if not ctx.sums:
            return ctx.group.own_rows(whole), None, None
        added = ctx.group.own_rows_of_sum(whole.to(torch.promote_types(whole.dtype, torch.float32)))
        return added.to(whole.dtype), None, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, total: int, group: TensorGroup) -> Tensor:
        ctx.first, ctx.width = group.first_of(total), x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -(-total // group.size) - x.shape[-1]))
        return torch.cat(list(group.stacked(padded)), dim=-1)[..., :total]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].narrow(-1, ctx.first, ctx.width), None, None


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def exchange(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """Rows that go to each rank, one after another: so many, or equally many; back come those from each rank."""
    return _tensor(_Exchange.apply(rows, group, sent, received))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        ctx.back = group, received, sent
        out = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grads[0], *ctx.back), None, None, None
