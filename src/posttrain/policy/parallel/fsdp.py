"""Sharded parameters (FSDP2), whole only while sampling or saving, and the part of a tensor that a rank holds."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def any_rank(own: bool, group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether it is so on any rank of the group. A collective."""
    votes = torch.tensor(float(own), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX, group)
    return bool(votes)


def shard(
    root: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    *,
    offloads: bool = False,
) -> None:
    """Shard each layer on its own, so that only one is whole at a time, and the rest with the root. `experts` are
    sharded over a mesh of theirs; without one they stay as they are. `offloads`: shards and their gradients are in host
    memory.
    """
    # Gradients are added up over ranks as over micro-batches.
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloads else OffloadPolicy()
    kept: set[nn.Parameter] = set()
    for module in experts:
        if expert_mesh is None:
            kept |= set(module.parameters())
        else:
            fully_shard(module, mesh=expert_mesh, mp_policy=in_fp32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=in_fp32, ignored_params=kept, offload_policy=place)
    fully_shard(root, mesh=mesh, mp_policy=in_fp32, ignored_params=kept, offload_policy=place)


@contextmanager
def whole_parameters(root: nn.Module) -> Iterator[None]:
    """All parameters whole on every rank, and the hooks of FSDP off. Inside, forward passes use no communication and no
    other stream, so ranks may run different ones, and a CUDA graph can capture them."""
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in sharded]
    try:
        for module in sharded:
            module.unshard()
            module._forward_pre_hooks = _without_fsdp(module, module._forward_pre_hooks)
            module._forward_hooks = _without_fsdp(module, module._forward_hooks)
        yield
    finally:
        for module, (before, after) in zip(sharded, hooks, strict=True):
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.reshard()


def _without_fsdp(module: FSDPModule, hooks: dict[int, Any]) -> dict[int, Any]:
    """Those that are not methods of the module's FSDP state."""
    state = module._get_fsdp_state()
    return OrderedDict((key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is not state)


def reshard(root: nn.Module) -> None:
    """Reshard parameters that a forward pass left unsharded: writes to the unsharded ones would be lost."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_into(parameter: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter that may be sharded."""
    local = local_part(parameter.detach())
    if isinstance(parameter, DTensor):
        for dim, (size, start) in enumerate(zip(local.shape, first_of_part(parameter), strict=True)):
            value = value.narrow(dim, start, size)
    local.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_of(parameter: Tensor) -> torch.device:
    """Where it is computed with; a shard may be in host memory."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.device_type != "cuda":
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def num_copies(tensor: DTensor) -> int:
    """How many ranks hold each number of it."""
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if placement.is_replicate())


def first_of_part(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(int(start) for start in offset)


def is_first_copy(tensor: DTensor) -> bool:
    """Of the ranks that hold the same part of it, whether this is the first."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return all(index == 0 for index, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate())


def first_row(tensor: Tensor) -> int:
    """Which row of the whole tensor this rank's part begins with."""
    return first_of_part(tensor)[0] if tensor.ndim else 0


def spread_parameter(
    part: Tensor, whole: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement], device: torch.device
) -> nn.Parameter:
    """Of this rank's part, which gets memory of its own: otherwise the whole tensor would stay in memory."""
    own = part.to(device, memory_format=torch.contiguous_format, copy=True)
    spread = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(spread, requires_grad=whole.requires_grad)


def as_shard(part: Tensor, whole: DTensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """`part` as this rank's rows of a tensor that is spread as `whole` is; `shape` where it differs after the rows.

    The part may be in host memory although the mesh is on GPUs; the public API would move it to the GPU.
    """
    full = torch.empty(whole.shape if shape is None else shape, dtype=part.dtype, device="meta")
    meta = TensorMeta(full.shape, full.stride(), part.dtype)
    return DTensor(part, DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta), requires_grad=False)
