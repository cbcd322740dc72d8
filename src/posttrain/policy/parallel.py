"""How ranks share the work: the mesh of ranks, and FSDP2, whose parameters are whole only while sampling or saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """How the ranks are arranged: data parallel x context parallel x tensor parallel, `tp` varying fastest.

    Ranks with the same `dp` index work on the same data.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of_process_group(cls) -> Mesh:
        return cls(dp=dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.tp

    def dp_index(self, rank: int) -> int:
        """Which shard of the data a rank works on."""
        return rank // (self.cp * self.tp)

    def one_per_shard(self, results: Sequence[T]) -> list[T]:
        """Of results by rank those of one rank for each shard of the data: the others computed the same."""
        return list(results[:: self.cp * self.tp])

    def data_parallel(self, device: torch.device) -> DeviceMesh | None:
        """The axis that parameters are sharded over; None where there is nothing to shard over."""
        axes = {name: size for name, size in (("dp", self.dp), ("cp", self.cp), ("tp", self.tp)) if size > 1}
        if "dp" not in axes:
            return None
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))["dp"]


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def shard(root: nn.Module, layers: list[nn.Module], mesh: DeviceMesh | None) -> None:
    """Shard each layer on its own, so that only one is whole at a time, and the rest with the root."""
    if mesh is None:
        return
    in_fp32 = MixedPrecisionPolicy(
        reduce_dtype=torch.float32
    )  # gradients are added up over ranks as over micro-batches
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=in_fp32)
    fully_shard(root, mesh=mesh, mp_policy=in_fp32)


@contextmanager
def whole_parameters(root: nn.Module) -> Iterator[None]:
    """All parameters whole on every rank. Inside, forward passes need no communication, so ranks may run different ones."""
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(module is not root, recurse=False)
            module.reshard()


def reshard(root: nn.Module) -> None:
    """Free the parameters that a forward pass has left whole: what is written into those is lost."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_into(parameter: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter that may be sharded."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value.to(parameter.device, parameter.dtype), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Which row of the whole tensor this rank's part begins with."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0])


def as_shard(part: Tensor, whole: DTensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """`part` as this rank's rows of a tensor that is spread as `whole` is; `shape` where it differs in what follows the rows.

    The part may lie in host memory although the mesh is one of GPUs, which the public way to make one would undo.
    """
    full = torch.empty(whole.shape if shape is None else shape, dtype=part.dtype, device="meta")
    meta = TensorMeta(full.shape, full.stride(), part.dtype)
    return DTensor(part, DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta), requires_grad=False)
