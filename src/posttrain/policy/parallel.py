"""FSDP2: parameters sharded over the ranks of a process group, and whole again while sampling or saving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def data_parallel_mesh(device: torch.device) -> DeviceMesh | None:
    """One axis over all ranks; None in a single process, where nothing is sharded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


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


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole state on the CPU of every rank; a collective when sharded."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in model.state_dict().items()
    }


@torch.no_grad()
def copy_into(parameter: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter that may be sharded."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value.to(parameter.device, parameter.dtype), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)
