"""Runs decoder layers of the Llama pattern (Llama, Mistral, Qwen2, Qwen3, SmolLM2 …) with the operations of `ops.py`.

A layer keeps its modules and its parameters; only its `forward` is replaced, in training and in sampling alike, so that
both round at the same places. A layer is recognised by its modules and then tested: if the replaced forward and the
original disagree on a few tokens (some families scale a residual or omit the rotation), the original stays. A block of
routed experts in place of the MLP is called as it is; its experts have a forward of their own (`experts.py`).

Weights that are multiplied with the same input are joined into one product, LoRA adapters with them
(`accumulate.joined`, `adapters.py`): the parameters become views of one tensor, so there is no second copy to
synchronise. Sharded parameters cannot be joined; their modules are called one by one, as are adapters that do more than
plain LoRA.

Where only the attention follows the pattern (experts instead of an MLP), the rest is called as it is; so is a mixer
of tokens in place of the attention (a gated delta net, attention with a gate), with the arguments that the layer gives
it. Norms and sums are fused in any case, also norms that multiply with 1 + weight.

In a pass without gradients a layer defers its last sum to the next norm (`PendingSum`), which saves one kernel launch
per layer. In training, states between layers are fp32, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.attention_interface import active_context
from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.experts import fuse_experts
from posttrain.policy.fused.fp8 import Fp8Product, ScaledRows, active_fp8, whole
from posttrain.policy.fused.products import Multiply, Product
from posttrain.policy.fused.trials import Observed, is_near, trial_pass, trial_states
from posttrain.policy.parallel.tensor_group import group_of, local_parameter
from posttrain.policy.runtime import triton_kernels

_PARTS_BESIDE_MIXER = {"mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_RECOMPUTES_IN_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)  # in the forward that is replaced
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}


def fuse_layers(decoder: nn.Module, *, may_join: bool) -> int:
    """Replace the forward of every layer that follows the pattern, and of routed experts; returns how many layers are
    fused now, attention and MLP included.

    Layers that are fused already stay as they are: trainer and engine both call this.
    """
    fuse_experts(decoder)
    layers: Any = getattr(decoder, "layers", None)
    parameter = next(decoder.parameters())
    kernels = triton_kernels("policy.fused.kernels")
    if not isinstance(layers, nn.ModuleList) or kernels is None or not kernels.runs_on(parameter.device):
        return 0
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNormGated") and hasattr(module, "variance_epsilon"):
            _fuse_gated_norm(module)
    rotary = getattr(decoder, "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        return 0
    fused = [_fuse(layer, rotary, may_join) for layer in layers]
    # Not where parameters are sharded: that has hooks between the layers.
    if all(fused) and _fuse_norm(getattr(decoder, "norm", None)) and may_join:
        _defer_sums(decoder)
    forwards: list[Any] = [layer.forward for layer in layers]
    return sum(replaced and forward.is_whole for forward, replaced in zip(forwards, fused, strict=True))


def _fuse(layer: Any, rotary: nn.Module, may_join: bool) -> bool:
    if isinstance(layer.forward, FusedLayer):
        return True
    children = {name for name, _ in layer.named_children()}
    # A sharded layer: the trainer has tried before.
    if isinstance(layer, FSDPModule) or not children > _PARTS_BESIDE_MIXER or len(children) > 4:
        return False
    (mixer,) = children - _PARTS_BESIDE_MIXER
    adds_one = _adds_one(layer.input_layernorm)
    if adds_one is None or _adds_one(layer.post_attention_layernorm) is not adds_one:
        return False
    calls_mixer = mixer != "self_attn" or adds_one or not _attention_follows_pattern(layer.self_attn)
    calls_mlp = not _mlp_follows_pattern(layer.mlp, tests_activation=calls_mixer)
    if (calls_mlp or calls_mixer) and group_of(layer) is not None:
        return False
    # Layer or rotation take other arguments than the pattern's; a mixer of any kind may need anything.
    refusals = Exception if calls_mixer else (TypeError, IndexError, ValueError)
    try:
        observed = Observed(layer, rotary, mixer if calls_mixer else None, calls_mlp)
    except refusals as error:
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        return False
    fused = FusedLayer(layer, observed, may_join, adds_one)
    if not calls_mixer and observed.num_rotated not in (fused.head_dim, fused.head_dim // 2):
        return False
    has_lost_sinks = not calls_mixer and "sinks" in observed.options and fused.sinks is None  # no parameter of it
    if has_lost_sinks or not observed.agrees(fused):
        return False
    layer.forward = fused
    return True


@torch.no_grad()
def _fuse_norm(norm: Any) -> bool:
    """The norm after the last layer."""
    if isinstance(getattr(norm, "forward", None), FusedNorm):
        return True
    if (adds_one := _adds_one(norm)) is None:
        return False
    fused = FusedNorm(norm, adds_one)
    states = trial_states(norm.weight)
    if not is_near(fused(states), norm(states), norm.weight.dtype):
        return False
    norm.forward = fused
    return True


@torch.no_grad()
def _fuse_gated_norm(norm: Any) -> None:
    """The norm of a gated delta net, over one head. Those of Mamba-2 are wider, or multiply with the gate before and
    fail the test."""
    if isinstance(norm.forward, FusedGatedNorm) or isinstance(norm.weight, DTensor) or len(norm.weight) > 512:
        return
    fused, states = FusedGatedNorm(norm), trial_states(norm.weight)[0].to(norm.weight.dtype)
    if is_near(fused(states, states.flip(0)), norm(states, states.flip(0)), norm.weight.dtype):
        norm.forward = fused


def _defer_sums(decoder: Any) -> None:
    """Tested on a few tokens: some family might use the states between two layers."""
    fused: list[FusedLayer] = [layer.forward for layer in decoder.layers]
    if any(forward.successor is not None for forward in fused):
        return
    pending = PendingSum()
    weight = decoder.norm.weight
    try:
        plain = trial_pass(decoder, weight)
    except (TypeError, ValueError, AttributeError, IndexError):  # it takes other arguments
        return
    for forward in (*fused, decoder.norm.forward):
        forward.pending = pending
    for place, forward in enumerate(fused):
        forward.successor = Successor(decoder, place)
    if not is_near(trial_pass(decoder, weight), plain, weight.dtype):
        for forward in fused:
            forward.successor = None


def _is_rms_norm(module: object) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


@torch.no_grad()
def _adds_one(norm: Any) -> bool | None:
    """Whether it multiplies with 1 + weight; None: it is no such norm. Families whose norms may do that call their
    epsilon `eps`."""
    if _is_rms_norm(norm):
        return False
    weight: Any = getattr(norm, "weight", None)
    eps = getattr(norm, "eps", None)
    is_whole = isinstance(weight, Tensor) and not isinstance(weight, DTensor)
    if not type(norm).__name__.endswith("RMSNorm") or not is_whole or eps is None:
        return None
    states = trial_states(weight)
    expected = norm.forward(states).float()
    plain = (states * (states.square().mean(-1, keepdim=True) + eps).rsqrt()).float()
    errors = [float((expected - plain * (weight.float() + one)).abs().max()) for one in (0.0, 1.0)]
    return errors[1] < errors[0] if min(errors) <= 1e-4 * float(expected.abs().max()) else None


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if _is_rms_norm(norm) else norm.eps)


def _attention_follows_pattern(attention: Any) -> bool:
    attended = {name for name, _ in attention.named_children()}
    head_norms = [module for name, module in attention.named_children() if name in _HEAD_NORMS]
    return (
        attended >= _ATTENTION_PARTS
        and attended - _ATTENTION_PARTS in (set(), _HEAD_NORMS)
        and all(map(_is_rms_norm, head_norms))
        and (head_dim := getattr(attention, "head_dim", None)) is not None
        and all(len(norm.weight) == head_dim for norm in head_norms)
    )


@torch.no_grad()
def _mlp_follows_pattern(mlp: Any, *, tests_activation: bool) -> bool:
    """Beside a large output of a mixer, the trial of a layer may not tell one activation from another."""
    names = {name for name, _ in mlp.named_children()}
    if not _MLP_PARTS <= names <= _MLP_PARTS | {"act_fn"}:
        return False
    activation, x = getattr(mlp, "act_fn", None), torch.linspace(-8, 8, 65)
    return not tests_activation or (activation is not None and torch.allclose(activation(x), F.silu(x), atol=1e-4))


def _whole_angles(halves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Some families give the angles of a half of each head. Of both halves; kept with the tensor for later layers."""
    kept = vars(halves[0])
    if "whole" not in kept:
        kept["whole"] = tuple(angles.repeat(1, 1, 2) for angles in halves)
    return kept["whole"]


def _rows(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Of the only sequence that a module was called with."""
    return (output[0] if isinstance(output, tuple) else output).squeeze(0).contiguous()


class PendingSum:
    """The deferred sum of a layer's output, applied by the norm of the next layer. One per decoder.

    The output passes through third-party code. So a sum is deferred only if nothing reads that output: no hooks, no
    recomputation, and a successor that supports it (`Successor`).
    """

    def __init__(self) -> None:
        self._states: Tensor | None = None
        self._delta: Tensor | ScaledRows | None = None

    def leave(self, states: Tensor, delta: Tensor | ScaledRows) -> Tensor:
        """`states`, to which `delta` is still to be added."""
        self._states, self._delta = states, delta
        return states

    def take(self, states: Tensor) -> Tensor | ScaledRows | None:
        """What the caller has to add to `states`; None if nothing is pending."""
        delta = self._delta if states is self._states else None
        self._states = self._delta = None
        return delta


@dataclass
class Successor:
    """The current successor of layer `place`: the next layer, or the norm after the last one."""

    decoder: Any
    place: int

    def takes_sum_of(self, layer: Any) -> bool:
        layers = self.decoder.layers
        follower = layers[self.place + 1] if self.place + 1 < len(layers) else self.decoder.norm
        recomputes = layer.training and getattr(layer, "gradient_checkpointing", False)
        return (
            not torch.is_grad_enabled()
            and not recomputes
            and not layer._forward_hooks
            and not follower._forward_pre_hooks
            and isinstance(follower.forward, FusedLayer | FusedNorm)
            and follower.forward.pending is layer.forward.pending
        )


class FusedLayer:
    """The forward of one decoder layer. Called by the layer itself, so that hooks and checkpointing stay in force."""

    def __init__(self, layer: Any, observed: Observed, may_join: bool, adds_one: bool) -> None:
        self.own_forward = layer.forward
        self.layer = layer
        self.adds_one = adds_one  # the norms
        self.calls_mlp = observed.calls_mlp
        self.mixer, self.mixer_options = observed.mixer, observed.mixer_options  # None: attention as in the pattern
        self.may_join = may_join
        self.successor: Successor | None = None  # may receive the deferred sum
        self.pending = PendingSum()
        if self.mixer is not None:
            return
        attention = layer.self_attn
        self.index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.constants = {name: value for name, value in observed.options.items() if name != "sinks"}
        # Trained, so looked up at every call.
        sinks, parameters = observed.options.get("sinks"), attention.named_parameters(recurse=False)
        self.sinks = next((name for name, parameter in parameters if parameter is sinks), None)
        widths = (attention.q_proj.out_features, attention.k_proj.out_features)
        self.num_heads, self.num_kv_heads = (int(width) // self.head_dim for width in widths)
        self.head_norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    @property
    def is_whole(self) -> bool:
        """No part of it is called as a module of its own kind."""
        return self.mixer is None and not self.calls_mlp

    def __call__(self, *states: Any, **arguments: Any) -> Tensor:
        layer = self.layer
        if not (_RECOMPUTES_IN_FORWARD and layer.training and getattr(layer, "gradient_checkpointing", False)):
            return self._compute(*states, **arguments)
        return layer._gradient_checkpointing_func(partial(self._compute, **arguments), *states)

    def _compute(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: object,
    ) -> Tensor:
        pending = self.pending.take(hidden_states)
        is_unknown = self.mixer is not None and not options.keys() <= self.mixer_options
        if len(hidden_states) != 1 or past_key_values is not None or position_embeddings is None or is_unknown:
            return self.own_forward(
                hidden_states if pending is None else hidden_states + whole(pending),
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **options,
            )
        from posttrain.policy.fused.ops import Add

        # Modules are looked up at every call: adapters may have been added or removed.
        layer, mlp = self.layer, self.layer.mlp
        x = hidden_states.squeeze(0).contiguous()
        delta: Tensor | ScaledRows
        if self.mixer is not None:
            x, y = self._add_and_norm(layer.input_layernorm, x, pending)
            given = {
                "hidden_states": y[None], "attention_mask": attention_mask, "position_ids": position_ids,
                "use_cache": use_cache, "position_embeddings": position_embeddings, **options,
            }  # fmt: skip
            delta = _rows(getattr(layer, self.mixer)(**{name: given.get(name) for name in self.mixer_options}))
        else:
            attention = layer.self_attn
            if position_embeddings[0].shape[-1] < self.head_dim:
                position_embeddings = _whole_angles(position_embeddings)
            cos, sin = (angles[0] for angles in position_embeddings)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            x, qkv = self._normed(layer.input_layernorm, x, pending, projections)
            seen = self._attend(qkv, cos, sin)
            delta = self._linear(attention.o_proj, seen.flatten(1))
        if self.calls_mlp:
            x, y = self._add_and_norm(layer.post_attention_layernorm, x, delta)
            delta = _rows(mlp(y[None]))
        else:
            x, gate_up = self._normed(layer.post_attention_layernorm, x, delta, (mlp.gate_proj, mlp.up_proj))
            delta = self._down(mlp.down_proj, gate_up)
        if self.successor is not None and self.successor.takes_sum_of(layer):
            return self.pending.leave(x[None], delta)
        return Add.apply(x, whole(delta))[None]

    def _add_and_norm(self, norm: Any, x: Tensor, delta: Tensor | ScaledRows | None) -> tuple[Tensor, Tensor]:
        from posttrain.policy.fused.ops import AddNorm

        delta = None if delta is None else whole(delta)
        return AddNorm.apply(x, delta, local_parameter(norm), _eps(norm), norm.weight.dtype, self.adds_one)

    @property
    def options(self) -> dict[str, Any]:
        """Of attention."""
        if self.sinks is None:
            return self.constants
        return {**self.constants, "sinks": getattr(self.layer.self_attn, self.sinks)}

    def module_groups(self) -> list[list[nn.Module]]:
        """The linear modules, those with the same input together; without those of a block of experts. Not around a
        mixer of another kind, which `fp8_obstacle` refuses."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        return [*groups, [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]] if not self.calls_mlp else groups

    def _product(self, modules: Sequence[nn.Module]) -> Product | None:
        product = product_of(modules) if self.may_join else None
        copies = active_fp8()
        return product if product is None or copies is None else copies.product(product)

    def _normed(
        self, norm: Any, x: Tensor, delta: Tensor | ScaledRows | None, modules: Sequence[nn.Module]
    ) -> tuple[Tensor, Tensor | ScaledRows | list[Tensor]]:
        """(x + delta, the modules' outputs for its norm): concatenated in one tensor, or one tensor each."""
        from posttrain.policy.fused.ops import AddNorm, NormedLinear

        product = self._product(modules)
        if isinstance(product, Fp8Product) and product.defers(len(x)):
            return product.deferred_of_norm(x, delta, norm.weight, _eps(norm))
        delta = None if delta is None else whole(delta)
        if product is not None:
            normed = (norm.weight, _eps(norm), self.adds_one)
            total, out = NormedLinear.apply(x, delta, *normed, product, *product.parts)
            return total, out
        group = group_of(self.layer)
        weight = local_parameter(norm, group if group is not None and group.splits_rows else None)
        total, y = AddNorm.apply(x, delta, weight, _eps(norm), norm.weight.dtype, self.adds_one)
        if group is not None:
            y = group.entering(y)
        return total, [module(y) for module in modules]

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor | ScaledRows:
        product = self._product([module])
        if product is None or product.weight.dtype != x.dtype:
            out: Tensor = module(x)
            return out.contiguous()
        if isinstance(product, Fp8Product) and product.defers(len(x)):
            return product.deferred(x)
        return Multiply.apply(x, product, *product.parts)

    def _down(self, module: nn.Module, gate_up: Tensor | ScaledRows | list[Tensor]) -> Tensor | ScaledRows:
        from posttrain.policy.fused.ops import Swiglu, SwigluLinear

        product = self._product([module])
        if isinstance(gate_up, ScaledRows):
            if isinstance(product, Fp8Product) and product.defers(len(gate_up.values)):
                return product.deferred_of_swiglu(gate_up)
            gate_up = whole(gate_up)
        if isinstance(gate_up, Tensor) and product is not None and product.weight.dtype == gate_up.dtype:
            return SwigluLinear.apply(gate_up, product, *product.parts)
        gate, up = gate_up if isinstance(gate_up, list) else gate_up.chunk(2, dim=1)
        return self._linear(module, Swiglu.apply(gate, up))

    def _attend(self, qkv: Tensor | ScaledRows | list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        context: Any = active_context()
        seen: Tensor
        if isinstance(qkv, list) or getattr(context, "kernel", None) is None:
            heads = self._heads(qkv if isinstance(qkv, list) else whole(qkv), cos, sin)
            seen = context.attend(self.index, *heads, **self.options)
        else:
            values, row_factors = qkv if isinstance(qkv, ScaledRows) else (qkv, None)
            queries, keys = self.head_norms
            norms = None if queries is None else (queries.weight, keys.weight, queries.variance_epsilon)
            seen = context.attend_unrotated(
                self.index, *self._parts(values), cos, sin, norms=norms, row_factors=row_factors, **self.options
            )
        return seen

    def _parts(self, qkv: Tensor) -> list[Tensor]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return list(qkv.split([count * self.head_dim for count in heads], dim=1))

    def _heads(self, qkv: Tensor | list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Queries, keys and values [tokens, heads, head dim], the first two rotated."""
        from posttrain.policy.fused.ops import AddNorm, Rotate

        if isinstance(qkv, Tensor) and self.head_norms[0] is None:
            turned_qkv = Rotate.apply(qkv, cos, sin, self.num_heads + self.num_kv_heads)
            return [part.unflatten(1, (-1, self.head_dim)) for part in self._parts(turned_qkv)]
        parts = self._parts(qkv) if isinstance(qkv, Tensor) else qkv
        turned = []
        for part, norm in zip(parts[:2], self.head_norms, strict=True):
            if norm is not None:
                rows = part.reshape(-1, self.head_dim).contiguous()
                weight = local_parameter(norm, group_of(self.layer))  # each rank has its own heads
                rows = AddNorm.apply(rows, None, weight, norm.variance_epsilon, norm.weight.dtype)[1]
                part = rows.view(part.shape)
            part = Rotate.apply(part.contiguous(), cos, sin, part.shape[1] // self.head_dim)
            turned.append(part)
        return [part.unflatten(1, (-1, self.head_dim)) for part in (*turned, parts[2])]


class FusedGatedNorm:
    """The forward of the norm after a gated delta rule."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self.own_forward = norm.forward

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        from posttrain.policy.fused.gated_norm import TRIAL, GatedNorm

        weight, eps = local_parameter(self.norm), self.norm.variance_epsilon
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden_states, gate, weight))
        if not TRIAL.passes(
            weight.device, hidden_states.dtype, gate_dtype=gate.dtype, weight_dtype=weight.dtype,
            width=len(weight), eps=eps, trains=trains,
        ):  # fmt: skip
            return self.own_forward(hidden_states, gate)
        rows = [x.reshape(-1, x.shape[-1]) for x in (hidden_states, gate)]
        out: Tensor = GatedNorm.apply(*rows, weight, eps)
        return out.view(hidden_states.shape)


class FusedNorm:
    """The forward of the norm after the last layer."""

    def __init__(self, norm: Any, adds_one: bool) -> None:
        self.own_forward = norm.forward
        self.norm = norm
        self.adds_one = adds_one
        self.pending = PendingSum()

    def __call__(self, hidden_states: Tensor) -> Tensor:
        from posttrain.policy.fused.ops import AddNorm

        pending = self.pending.take(hidden_states)
        if hidden_states.dim() != 3 or len(hidden_states) != 1:
            return self.own_forward(hidden_states if pending is None else hidden_states + whole(pending))
        x = hidden_states.squeeze(0).contiguous()
        weight = local_parameter(self.norm)
        delta = None if pending is None else whole(pending)
        normed: Tensor = AddNorm.apply(x, delta, weight, _eps(self.norm), x.dtype, self.adds_one)[1]
        return normed[None]
