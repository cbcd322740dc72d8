"""Stacked experts of `transformers` models: where they are, and their products over rows in the order of experts.

Used where the forward pass of `transformers` does not do: experts over ranks (`parallel/experts.py`), and experts with
LoRA adapters, whose products are computed beside those of the weights. peft would add them to the weights of all
experts in every pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.policy.autograd import Context
from posttrain.policy.parallel.fsdp import local_part


def stacked_experts(model: nn.Module) -> dict[str, Any]:
    """Modules that hold all routed experts of a layer in tensors whose first axis is the expert, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and "down_proj" in module._parameters
    }


@dataclass(frozen=True)
class SortedRows:
    """Pairs of a token and an expert, in the order of experts."""

    order: Tensor  # which pair comes at each place; pairs are numbered token by token
    num_rows: Tensor  # [experts]

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> SortedRows:
        return cls(experts.argsort(stable=True), count_rows(experts, num_experts))

    def back(self, rows: Tensor) -> Tensor:
        """Rows in the order of pairs."""
        places = torch.arange(len(self.order), device=self.order.device)
        return rows.index_select(0, torch.empty_like(self.order).scatter_(0, self.order, places))


def count_rows(experts: Tensor, num_experts: int) -> Tensor:
    """Without `bincount`, which has no deterministic version on a GPU."""
    return torch.zeros(num_experts, dtype=torch.long, device=experts.device).index_add_(
        0, experts, torch.ones_like(experts)
    )


def expert_outputs(
    module: Any, rows: Tensor, num_rows: Tensor, *, first_expert: int = 0, gradient_factor: float = 1.0
) -> Tensor:
    """The outputs of a module's experts, before the router's weights.

    `rows` are inputs in the order of experts, `num_rows` how many each has; the first is `first_expert` of all.
    Gradients of the module's parameters, not of its adapters, are multiplied by `gradient_factor`.
    """
    adapters: dict[str, Any] = getattr(module.forward, "adapters", {})
    ends = num_rows.cumsum(0, dtype=torch.int32)
    expert_of = torch.repeat_interleave(num_rows, output_size=len(rows)) if module.has_bias else None

    def parameter(name: str) -> Tensor:
        own = local_part(module._parameters[name])
        return own if gradient_factor == 1.0 else _ScaledGradient.apply(own, gradient_factor)

    def product(name: str, x: Tensor) -> Tensor:
        weight = parameter(name)
        out = grouped_product(x, weight if module.is_transposed else weight.transpose(-2, -1), ends)
        if expert_of is not None:
            out = out + parameter(f"{name}_bias")[expert_of]
        for down, up, scaling in adapters_of(adapters.get(name), first_expert, len(num_rows)):
            out = out + grouped_product(grouped_product(x, down, ends), up, ends) * scaling
        return out

    if module.has_gate:
        inner = module._apply_gate(product("gate_up_proj", rows))
    else:
        inner = module.act_fn(product("up_proj", rows))
    out = product("down_proj", inner)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


class AdaptedExperts:
    """The forward of a module of stacked experts that peft has given adapters."""

    def __init__(self, module: Any, adapters: dict[str, Any]) -> None:
        self.module, self.adapters = module, adapters

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        pairs = SortedRows.of(top_k_index.flatten(), self.module.num_experts)
        rows = hidden.index_select(0, pairs.order // top_k_index.shape[-1])
        outputs = expert_outputs(self.module, rows, pairs.num_rows)
        return weighted_sum(pairs.back(outputs), top_k_weights, hidden.dtype)


def compute_adapters_by_rows(model: nn.Module) -> None:
    """Adapters of parameters that peft would add to the parameters in every pass: those of stacked experts are computed
    by `AdaptedExperts`, those of a matrix (a router) are added to it without a parametrisation. May be called again.
    """
    lora: Any = sys.modules.get("peft.tuners.lora.layer")  # a model with such a module has imported it
    if lora is None:
        return
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, lora.ParamWrapper)]
    experts = {id(module): module for module in stacked_experts(model).values()}
    by_module: dict[int, dict[str, Any]] = {}
    for wrapper in wrappers:
        base = wrapper.get_base_layer()
        if id(base) in experts:
            by_module.setdefault(id(base), {})[wrapper.parameter_name] = wrapper
            wrapper.forward = wrapper.base_layer.__call__
        elif wrapper.base_layer is base and base._parameters[wrapper.parameter_name].ndim == 2:
            wrapper.forward = _AdaptedMatrix(wrapper)
    for key, adapters in by_module.items():
        if not hasattr(experts[key].forward, "adapters"):
            experts[key].forward = AdaptedExperts(experts[key], adapters)


class _AdaptedMatrix:
    """The forward of peft's wrapper of a parameter, which the module reads as an attribute."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper, base = self.wrapper, self.wrapper.base_layer
        weight = base._parameters[wrapper.parameter_name]
        for name in active_adapters(wrapper):
            weight = weight + wrapper.get_delta_weight(name)
        base.__dict__[wrapper.parameter_name] = weight
        try:
            return base(*args, **kwargs)
        finally:
            del base.__dict__[wrapper.parameter_name]


def target_of(base: nn.Module, name: str) -> tuple[str, Any]:
    """What peft's adapter `<module>.lora_A.weight` adapts, and the module of stacked experts that has it, if one has.

    Of two adapters of such a module that of the outputs is the outer one.
    """
    module = name.partition(".lora_")[0]
    stacks = {place.replace(".base_layer", ""): stack for place, stack in stacked_experts(base).items()}
    if (stack := stacks.get(module.removesuffix(".base_layer"))) is None:
        return f"{module}.weight", None
    inputs = "gate_up_proj" if stack.has_gate else "up_proj"
    return f"{module.removesuffix('.base_layer')}.{inputs if module.endswith('.base_layer') else 'down_proj'}", stack


def adapters_by_file(base: nn.Module, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters, by peft's names without its prefix, of the tensors that the model's files hold: of stacked experts one
    for each, as vLLM loads them. Gate and up projection have one A and their own rows of B.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = {}
    for name, tensor in adapters.items():
        target, stack = target_of(base, name)
        which, factor = name.rpartition(".lora_")[2][0], tensor
        if stack is not None and which == "A":
            factor = tensor.unflatten(0, (stack.num_experts, -1))
            factor = torch.cat([factor, factor], 1) if target.endswith("gate_up_proj") else factor
        elif stack is not None:
            factor = tensor.unflatten(1, (-1, stack.num_experts)).permute(2, 0, 1)
        parts = revert_weight_conversion(base, {target: factor})
        if stack is not None and target in parts:  # the files hold them stacked too
            parts = {name.partition(".lora_")[0]: tensor}
        for file, part in parts.items():
            found[f"{file.removesuffix('.weight')}.lora_{which}.weight"] = part.contiguous()
    return found


def active_adapters(wrapper: Any) -> list[str]:
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()
    is_off = wrapper.disable_adapters or wrapper.merged
    return [] if is_off else [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def adapters_of(wrapper: Any, first: int, number: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Of some experts [experts, inputs, rank] and [experts, rank, outputs], and their factor. peft's matrices have
    expert after expert in the rows of A, and in the columns of B the experts of the first rank, then of the second."""
    for name in [] if wrapper is None else active_adapters(wrapper):
        down, up = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        own = slice(first, first + number)
        down = down.unflatten(0, (wrapper.num_experts, -1))[own].transpose(-2, -1)
        up = up.unflatten(1, (-1, wrapper.num_experts))[..., own].permute(2, 1, 0)
        # Grouped products want rows of whole 16 bytes.
        padding = -down.shape[-1] % (16 // down.element_size())
        yield F.pad(down, (0, padding)), F.pad(up, (0, 0, 0, padding)).contiguous(), wrapper.scaling[name]


def weighted_sum(outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each token's experts: outputs [tokens x experts of a token, hidden size] in the order of pairs."""
    return (outputs * weights.reshape(-1, 1)).unflatten(0, weights.shape).sum(1).to(dtype)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, inputs] @ weight [experts, inputs, outputs] of each row's expert; an expert's rows end at `ends`."""
    x = x.to(weight.dtype)
    is_aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if len(x) and is_aligned and weight.dtype != torch.float64:
        return F.grouped_mm(x, weight, offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())  # each weight gets a gradient, of zeros where it has no rows
    return torch.cat([part @ own for part, own in zip(parts, weight.unbind(), strict=True)])


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None
