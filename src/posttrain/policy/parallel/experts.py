"""Splits the experts of a model over ranks: expert parallelism.

Each rank of a group holds an equal share of every layer's experts, and all of the other layers. It computes its own
tokens; at the experts of a layer the rows of tokens travel to the ranks that hold their experts, and the outputs back.
The experts' parameters are DTensors on the axis `ep` of a mesh of their own, whose other axes FSDP spreads them over.

In training all ranks make the same passes. While sampling they do not: before each pass, the ranks of a group agree on
whether any of them makes one, and those that do not serve their experts to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from posttrain.errors import InputError
from posttrain.policy.experts import SortedRows, expert_outputs, stacked_experts, weighted_sum
from posttrain.policy.head import Head, without_adapter_wrapper
from posttrain.policy.parallel.fsdp import any_rank, spread_parameter
from posttrain.policy.parallel.tensor_group import exchange

FIELD = "policy.dtensor_cfg.expert_parallel_size"


class ExpertGroup:
    """The ranks that share the experts of each layer, from the view of this rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh  # its axis `ep`, and `tp` where ranks share the other layers
        self.size = mesh.size(0)
        self.layers: list[ExpertsOverRanks] = []  # in the order in which a pass computes them
        self._passes_differ = False

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("ep")

    def split(self, model: nn.Module, head: Head, device: torch.device) -> list[nn.Module]:
        """Leave this rank its share of the experts, on `device`. Returns the modules that hold them."""
        found = stacked_experts(model)
        config = without_adapter_wrapper(model).config.get_text_config()
        if not found:
            raise InputError(
                f"{FIELD} = {self.size}: the family {config.model_type} has no experts that transformers keeps in "
                "stacked tensors; set it to 1"
            )
        for name, module in found.items():
            if module.num_experts % self.size:
                raise InputError(
                    f"{FIELD} = {self.size} does not divide the {module.num_experts} experts of {name}: each rank has "
                    "an equal share"
                )
        if self.mesh.ndim > 1 and any(hasattr(module.forward, "adapters") for module in found.values()):
            raise InputError(
                f"{FIELD} = {self.size} with adapters of experts and tensor_parallel_size = {self.mesh.size(1)}: that "
                "is not implemented; set one of the sizes to 1, or leave experts and router without adapters "
                "(policy.dtensor_cfg.lora_cfg.match_all_linear=false and target_modules)"
            )
        for module in found.values():
            for kind, parameter in module._parameters.items():
                module._parameters[kind] = self._share(parameter, device)
            module.forward = ExpertsOverRanks(module, self)
        if self.mesh.ndim == 1 and head.embedding.weight.device.type != device.type:
            model.to(device)  # all that is not split; ranks that share layers split it next
        head.decoder.register_forward_pre_hook(self._begin_pass)
        return list(found.values())

    def _share(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        own = parameter.detach().chunk(self.size)[self.mesh.get_local_rank("ep")]
        placements = [Shard(0) if axis == "ep" else Replicate() for axis in self.mesh.mesh_dim_names or ()]
        return spread_parameter(own, parameter, self.mesh, placements, device)

    def _begin_pass(self, *_: object) -> None:
        if self._passes_differ:
            any_rank(True, self.group, self.mesh.device_type)

    @contextmanager
    def different_passes(self) -> Iterator[None]:
        """Inside, ranks may make different numbers of passes. It ends on all of them together."""
        self._passes_differ = True
        try:
            yield
        finally:
            self._passes_differ = False
            while any_rank(False, self.group, self.mesh.device_type):
                for layer in self.layers:
                    layer.serve()


def spreads_experts(model: nn.Module) -> bool:
    """Whether ranks share the experts of this model."""
    return any(isinstance(module.forward, ExpertsOverRanks) for module in stacked_experts(model).values())


class ExpertsOverRanks:
    """The forward of a module that holds a share of the experts."""

    def __init__(self, module: Any, group: ExpertGroup) -> None:
        self.module, self.group = module, group
        self.adapters: dict[str, Any] = getattr(module.forward, "adapters", {})
        self._last: tuple[Tensor, Tensor, Tensor] | None = None  # inputs without rows, to serve with
        self._share = module.num_experts // group.size
        self._first = self._share * group.mesh.get_local_rank("ep")

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._last is None:
            self.group.layers.append(self)
            self._last = hidden.detach()[:0], top_k_index[:0], top_k_weights.detach()[:0]
        size, module = self.group.size, self.module
        pairs = SortedRows.of(top_k_index.flatten(), module.num_experts)
        rows = hidden.index_select(0, pairs.order // top_k_index.shape[-1]).to(module.down_proj.dtype)
        # [ranks, experts of a rank]: the rows that go to each rank, and those that come from it
        sent = pairs.num_rows.unflatten(0, (size, self._share))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group.group)
        lengths = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = exchange(rows, self.group.group, *lengths)
        by_rank = torch.arange(self._share, device=rows.device).repeat(size)
        here = SortedRows.of(by_rank.repeat_interleave(received.flatten(), output_size=len(rows)), self._share)
        # The loss is multiplied by the number of ranks that FSDP averages gradients over; it averages those of experts,
        # which are sums over the group already, over fewer.
        own = {"first_expert": self._first, "gradient_factor": 1 / size}
        outputs = expert_outputs(module, rows.index_select(0, here.order), here.num_rows, **own)
        outputs = exchange(here.back(outputs), self.group.group, *lengths[::-1])
        return weighted_sum(pairs.back(outputs), top_k_weights, hidden.dtype)

    def serve(self) -> None:
        """Compute what other ranks send, without rows of its own."""
        assert self._last is not None
        with torch.no_grad():
            self(*self._last)
