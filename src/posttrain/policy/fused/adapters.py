"""Determines which product linear modules, with or without peft's LoRA adapters, currently compute.

The result may change from call to call: adapters are disabled for the reference's log-probabilities, merged or
switched, and their dropout is active only in training. So it is determined at every call, which takes a few
microseconds. Only the plain kind is supported: an ordinary linear layer under one active adapter without dropout and
with nothing but A, B and a scaling. For everything else the result is None, and the modules have to be called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from posttrain.policy.fused.accumulate import joined
from posttrain.policy.fused.products import LowRank, Product


@dataclass(frozen=True)
class _Adapter:
    down: Tensor  # A [rank, inputs]
    up: Tensor  # B [outputs, rank]
    scaling: float


class _NotPlain(Exception):
    """A module that does more than plain LoRA."""


def product_of(modules: Sequence[nn.Module]) -> Product | None:
    """Modules with the same input as one product; None if the modules must be called individually."""
    try:
        resolved = [_resolve(module) for module in modules]
    except _NotPlain:
        return None
    weights = tuple(linear.weight for linear, _ in resolved)
    biases = tuple(linear.bias for linear, _ in resolved)
    has_bias = biases[0] is not None
    if any((bias is not None) is not has_bias for bias in biases):
        return None
    adapters = [adapter for _, adapter in resolved]
    everything = [*weights, *(biases if has_bias else ())]
    for adapter in adapters:
        everything += () if adapter is None else (adapter.down, adapter.up)
    dtype, device = everything[0].dtype, everything[0].device
    alike = all(tensor.dtype is dtype and tensor.device == device for tensor in everything)
    if not alike or len(set(map(id, everything))) < len(everything):
        return None
    return Product(
        weights,
        biases if has_bias else (),
        joined(weights),
        joined(biases) if has_bias else None,
        _low_rank(weights, adapters),
    )


def is_adapted(module: nn.Module) -> bool:
    """Whether it is the linear layer of peft's LoRA."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")  # a model with such a module has imported it
    return lora is not None and type(module) is lora.Linear


def capture_key(model: nn.Module) -> int:
    """A number that changes when a captured CUDA graph no longer computes what the model does: other adapters are
    active, or a parameter has another address. New values at the same address do not change it.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    adapters = tuple(
        (m.disable_adapters, *m.merged_adapters, *m.active_adapters, *getattr(m, "scaling", {}).values())
        for m in modules
    )
    return hash((adapters, tuple(parameter.data_ptr() for parameter in model.parameters())))


def _resolve(module: Any) -> tuple[nn.Linear, _Adapter | None]:
    """The linear layer, and the adapter that is active on it."""
    if module._forward_hooks or module._forward_pre_hooks:  # of a batch with several adapters, among others
        raise _NotPlain
    if type(module) is nn.Linear:
        return module, None
    if not is_adapted(module):
        raise _NotPlain
    base = _linear(module.base_layer)
    if module.disable_adapters:
        if module.merged:  # when called, it unmerges the adapters first
            raise _NotPlain
        return base, None
    active = [] if module.merged else [name for name in module.active_adapters if name in module.lora_A]
    if len(active) > 1:
        raise _NotPlain
    return base, _adapter(module, active[0]) if active else None


def _adapter(module: Any, name: str) -> _Adapter:
    dropout = module.lora_dropout[name]
    drops = not isinstance(dropout, nn.Identity) and (
        not isinstance(dropout, nn.Dropout) or (dropout.training and dropout.p > 0)
    )
    down, up = _linear(module.lora_A[name]), _linear(module.lora_B[name])
    if drops or name in module.lora_variant or down.bias is not None or up.bias is not None:
        raise _NotPlain
    return _Adapter(down.weight, up.weight, float(module.scaling[name]))


def _linear(module: object) -> nn.Linear:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        raise _NotPlain
    return module


def _low_rank(weights: Sequence[Tensor], adapters: Sequence[_Adapter | None]) -> LowRank | None:
    adapted, start = [], 0
    for weight, adapter in zip(weights, adapters, strict=True):
        if adapter is not None:
            adapted.append(((start, weight.shape[0]), adapter))
        start += weight.shape[0]
    if not adapted:
        return None
    downs = tuple(adapter.down for _, adapter in adapted)
    return LowRank(
        downs=downs,
        ups=tuple(adapter.up for _, adapter in adapted),
        down=joined(downs),
        spans=tuple(span for span, _ in adapted),
        scalings=tuple(adapter.scaling for _, adapter in adapted),
    )
