"""State in fewer bits, without masters, or in host memory: `CompactAdam` behind the ordinary optimizer's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from posttrain.errors import InputError
from posttrain.policy.fused.accumulate import move_to_sum, sum_of
from posttrain.policy.optimizer.compact_adam import CompactAdam, StateFormat
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer, parameter_of
from posttrain.policy.optimizer.schedule import SchedulerSpec, resolve
from posttrain.policy.parallel.fsdp import as_shard, local_part


class CompactOptimizer(MixedPrecisionOptimizer):
    """Masters, where there are any, are part of the optimizer's state; `masters` are the parameters themselves."""

    optimizer: CompactAdam

    def __init__(
        self,
        model: nn.Module,
        name: str,
        kwargs: Mapping[str, object],
        scheduler: SchedulerSpec,
        form: StateFormat,
        seed: int,
    ) -> None:
        self.form, self.seed = form, seed
        super().__init__(model, name, kwargs, scheduler)

    def _make_masters(self) -> dict[str, nn.Parameter]:
        return dict(self.parameters)

    def _make(self, name: str, kwargs: Mapping[str, Any]) -> Optimizer:
        kind = resolve(name, "policy.optimizer.name")
        if kind not in (Adam, AdamW):
            raise InputError(
                f"policy.optimizer.name is {name}: state_dtype, master_weights and offload_states are for "
                "torch.optim.AdamW and torch.optim.Adam"
            )
        return CompactAdam(self.parameters, self.form, seed=self.seed, decoupled=kind is AdamW, **kwargs)

    @torch.no_grad()
    def _collect(self, name: str) -> None:
        move_to_sum(self.parameters[name])
        if (total := sum_of(self.parameters[name])) is not None:
            self.optimizer.gradients[name] = total

    def _gradients(self) -> dict[str, Tensor]:
        return self.optimizer.gradients

    def _apply(self, scale: float) -> None:
        self.optimizer.gradient_scale = scale
        self.optimizer.step()

    def forget_gradients(self) -> None:
        self.optimizer.gradients.clear()
        super().forget_gradients()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """As the ordinary optimizer names them: moving the state to host memory and back changes no checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                key = f"master/{name}" if entry == "master" else f"state/{name}/{entry}"
                tensors[key] = value
                if isinstance(parameter, DTensor) and entry != "step":
                    # Its rows are the parameter's; scales have fewer columns.
                    is_scale = value.shape != local_part(parameter).shape
                    shape = (parameter.shape[0], *value.shape[1:]) if is_scale else tuple(parameter.shape)
                    tensors[key] = as_shard(value, parameter, shape)
        return tensors

    def empty_like_saved(self, saved: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for key, (shape, dtype) in saved.items():
            parameter = self.parameters[parameter_of(key)]
            if len(shape) == 0:
                tensors[key] = torch.empty((), dtype=dtype)
                continue
            part = local_part(parameter)
            device = "cpu" if self.form.offload else part.device
            is_scale = tuple(shape) != tuple(parameter.shape)
            own = (part.shape[0], *shape[1:]) if is_scale else part.shape
            empty = torch.empty(own if isinstance(parameter, DTensor) else tuple(shape), dtype=dtype, device=device)
            tensors[key] = as_shard(empty, parameter, tuple(shape)) if isinstance(parameter, DTensor) else empty
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.optimizer.state.clear()
        entries: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            entry = "master" if key.startswith("master/") else key.rpartition("/")[2]
            entries.setdefault(parameter_of(key), {})[entry] = local_part(tensor)
        for name, state in entries.items():
            self.optimizer.put_state(name, self._with_master(name, state))

    def _with_master(self, name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint of an fp32 run has no masters, one of a bf16 run has some that an fp32 run does not need."""
        weight = local_part(self.parameters[name].detach())
        if self.form.masters and weight.dtype != torch.float32:
            master = state.get("master", weight.float())
            weight.copy_(master)
            return {**state, "master": master}
        if "master" in state:
            weight.copy_(state["master"])
        return {entry: tensor for entry, tensor in state.items() if entry != "master"}

    def _kinds(self) -> dict[str, list[str]]:
        in_fp32 = all(parameter.dtype == torch.float32 for parameter in self.parameters.values())
        return {
            **super()._kinds(),
            "policy.optimizer.state_dtype": [self.form.moments],
            "policy.optimizer.master_weights": ["float32" if self.form.masters or in_fp32 else "none"],
        }
