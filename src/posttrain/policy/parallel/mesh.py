"""The mesh of ranks: how data, rows and layers are spread over them, and its process groups."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain.config.policy import DtensorConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """How the ranks are arranged: data parallel x context parallel x tensor parallel, `tp` varying fastest.

    Ranks with the same `dp` index work on the same data: those of `cp` on parts of each row, those of `tp` with parts
    of each layer. Of the others, `ep` neighbours share the experts of each layer.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    replicas: int = 1  # groups of ranks that each hold a full model and exchange only gradients
    ep: int = 1

    @classmethod
    def over(cls, num_ranks: int, parallel: DtensorConfig) -> Mesh:
        """`num_ranks` is a multiple of what the config asks for: checked when it was loaded."""
        cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
        replicas, ep = parallel.dp_replicate_size or 1, parallel.expert_parallel_size or 1
        assert num_ranks % (cp * tp * replicas) == num_ranks // (tp * replicas) % ep == 0
        return cls(num_ranks // (cp * tp), cp, tp, replicas, ep)

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Ranks that FSDP averages gradients over: each computed those of its own tokens."""
        return self.dp * self.cp

    @property
    def for_sampling(self) -> Mesh:
        """Ranks that share rows in training have the same weights while sampling, and sample different rows."""
        return Mesh(dp=self.dp * self.cp, tp=self.tp)

    def dp_index(self, rank: int) -> int:
        """Which shard of the data a rank works on."""
        return rank // (self.cp * self.tp)

    def one_per_shard(self, results: Sequence[T]) -> list[T]:
        """Of results by rank those of one rank for each shard of the data: the others computed the same."""
        return list(results[:: self.cp * self.tp])

    def axes(self, device: torch.device, *, offloads: bool = False) -> Axes:
        """The process groups of this arrangement. Every rank calls this, in the same order as others of its kind.

        `offloads`: FSDP keeps parameters in host memory, also those of a single rank.
        """
        if self.size == 1 and not offloads:
            return Axes()
        if not dist.is_initialized():
            backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        sizes = {"replicas": self.replicas, "dp": self.num_shards // self.replicas, "tp": self.tp}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        rows = None
        if self.cp > 1:
            grid = init_device_mesh(device.type, (self.dp, self.cp, self.tp), mesh_dim_names=("data", "cp", "part"))
            rows = grid["cp"]
        experts = self._expert_axes(device)
        if self.tp == 1:
            return Axes(mesh, None, rows, *experts)
        _silence_gathering()
        return Axes(mesh["replicas", "dp"] if self.replicas > 1 else mesh["dp"], mesh["tp"], rows, *experts)

    def _expert_axes(self, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """A mesh of the same ranks for the parameters of experts: what FSDP spreads them over, and the others."""
        if self.ep == 1:
            return None, None
        _silence_gathering()
        num_shards = self.num_shards // self.replicas // self.ep
        spread = {"replicas": self.replicas, "edp": num_shards} if self.replicas > 1 else {"edp": num_shards}
        spread = spread if self.replicas * num_shards > 1 else {}
        kept = {"ep": self.ep, "tp": self.tp} if self.tp > 1 else {"ep": self.ep}
        sizes = {**spread, **kept}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh[tuple(spread)] if spread else None, mesh[tuple(kept)]


@dataclass(frozen=True)
class Axes:
    """The axes of the mesh that this rank is on; None where it is alone."""

    parameters: DeviceMesh | None = None  # those that FSDP spreads parameters over: data and context parallel ranks
    layers: DeviceMesh | None = None  # tensor parallel ranks
    rows: DeviceMesh | None = None  # context parallel ranks
    expert_parameters: DeviceMesh | None = None  # those that FSDP spreads the experts' parameters over
    experts: DeviceMesh | None = None  # expert parallel ranks, and tensor parallel ones


def _silence_gathering() -> None:
    """torch warns that a tensor which is spread over two axes is gathered in two operations."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
