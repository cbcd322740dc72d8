"""Runs decoder layers of the Llama pattern (Llama, Mistral, Qwen2, Qwen3, SmolLM2 …) with the operations of `ops.py`.

A layer keeps its modules and its parameters; only its `forward` is replaced, in training and in sampling alike, so that
both round at the same places. A layer is recognised by what it is made of, and then tried: where the replaced forward and
the module's own disagree on a few tokens (some families scale a residual, or leave the rotation out), the module's own stays.

Weights that meet the same input are joined into one product, LoRA adapters with them (`joining.py`, `adapters.py`): the
parameters become views of one tensor, so nothing is copied for good and nothing has to be kept in step. Sharded
parameters cannot be joined; their modules are called one by one, as are adapters that do more than plain LoRA.

Where no gradients are wanted, a layer leaves its last sum to the norm that comes next, which computes it on its way: a
launch less in every layer, and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.policy.attention import PackedAttention, Segment, active_context, attention_context
from posttrain.policy.fused.adapters import product_of
from posttrain.policy.fused.products import Multiply, Product

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
_TRIAL_TOKENS = 8
_PENDING = "pending_delta"  # attribute of a layer's output: what is still to be added to it


def fuse_layers(decoder: nn.Module, *, may_join: bool) -> int:
    """Replace the forward of every layer that follows the pattern; returns how many are fused now.

    Layers that are fused already stay as they are: whoever runs a model may call this, trainer and sampler alike.
    """
    layers: Any = getattr(decoder, "layers", None)
    parameter = next(decoder.parameters())
    if not isinstance(layers, nn.ModuleList) or not _kernels_run_on(parameter.device):
        return 0
    rotary = getattr(decoder, "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        return 0
    num_fused = sum(_fuse(layer, rotary, may_join) for layer in layers)
    if num_fused == len(layers) and _fuse_norm(getattr(decoder, "norm", None)):
        for fused in (layer.forward for layer in layers if isinstance(layer.forward, FusedLayer)):
            fused.leaves_sum = fused.may_join  # sharding has hooks between the layers
    return num_fused


def _kernels_run_on(device: torch.device) -> bool:
    try:
        from posttrain.policy.fused import kernels
    except ImportError:  # a torch build without Triton
        return False
    return kernels.runs_on(device)


def _fuse(layer: nn.Module, rotary: nn.Module, may_join: bool) -> bool:
    if isinstance(layer.forward, FusedLayer):
        return True
    if not _follows_pattern(layer):
        return False
    try:
        observed = _Observed(layer, rotary)
    except (TypeError, IndexError):  # layer or rotation want other arguments than the pattern's
        return False
    fused = FusedLayer(layer, observed, may_join)
    if not observed.agrees(fused):
        return False
    layer.forward = fused
    return True


@torch.no_grad()
def _fuse_norm(norm: Any) -> bool:
    """That behind the last layer."""
    if not _is_rms_norm(norm):
        return False
    if isinstance(norm.forward, FusedNorm):
        return True
    fused = FusedNorm(norm)
    states = _trial_states(norm.weight)
    if not _near(fused(states), norm.forward(states), norm.weight.dtype):
        return False
    norm.forward = fused
    return True


def _is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _reduced(weight: Tensor) -> torch.dtype | None:
    return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else None


def _trial_states(weight: Tensor) -> Tensor:
    """Between layers states are fp32, also where the weights are not."""
    states = torch.randn(1, _TRIAL_TOKENS, len(weight), generator=torch.Generator().manual_seed(0))
    return states.to(weight.device, torch.float32 if _reduced(weight) is not None else weight.dtype)


def _near(ours: Tensor, theirs: Tensor, dtype: torch.dtype, spread: Tensor | None = None) -> bool:
    """To the rounding of weights in `dtype`, by the largest of `spread`, or of `theirs`."""
    error = (ours - theirs).float().abs().max()
    tolerance = 3e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return bool(error <= tolerance * (theirs if spread is None else spread).float().abs().max())


def _follows_pattern(layer: Any) -> bool:
    children = dict(layer.named_children())
    if set(children) != _LAYER_PARTS:
        return False
    attended = {name for name, _ in layer.self_attn.named_children()}
    fed = {name: module for name, module in layer.mlp.named_children() if name not in _MLP_PARTS}
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [module for name, module in layer.self_attn.named_children() if name in _HEAD_NORMS]
    return (
        attended >= _ATTENTION_PARTS
        and attended - _ATTENTION_PARTS in (set(), _HEAD_NORMS)
        and {name for name, _ in layer.mlp.named_children()} >= _MLP_PARTS
        and all(name == "act_fn" for name in fed)
        and all(map(_is_rms_norm, norms))
        and getattr(layer.self_attn, "head_dim", None) is not None
    )


class _Observed:
    """One pass of a layer's own forward over a few tokens: what it asks of attention, and what comes out."""

    @torch.no_grad()
    def __init__(self, layer: Any, rotary: nn.Module) -> None:
        norm = layer.input_layernorm.weight
        self.reduced = _reduced(norm)
        self.states = _trial_states(norm)
        positions = torch.arange(_TRIAL_TOKENS, device=norm.device)[None]
        self.angles: tuple[Tensor, Tensor] = rotary(self.states, positions)
        self.options: dict[str, Any] = {}
        self.segments = PackedAttention([Segment(0, _TRIAL_TOKENS)], norm.device)
        self.layer = layer
        self.output = self._run(layer.forward)  # not the layer: hooks may come later, sharding's among them

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.options = options
        return self.segments.attend(layer, query, key, value, **options)

    def _run(self, forward: Callable[..., Any]) -> Tensor:
        device = self.states.device.type
        training = [module for module in self.layer.modules() if module.training]
        for module in training:  # an adapter's dropout would be another one each time
            module.training = False
        try:
            with (
                attention_context(self),
                torch.autocast(device, self.reduced, enabled=self.reduced is not None, cache_enabled=False),
            ):
                output = forward(self.states, position_embeddings=self.angles)
        finally:
            for module in training:
                module.training = True
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def agrees(self, fused: FusedLayer) -> bool:
        if self.angles[0].shape[-1] != fused.head_dim or not self.options:
            return False
        dtype = self.reduced or self.states.dtype
        return _near(self._run(fused), self.output, dtype, spread=self.output - self.states)


class FusedLayer:
    """The forward of one decoder layer. Called by the layer itself, so that hooks and checkpointing stay in force."""

    def __init__(self, layer: Any, observed: _Observed, may_join: bool) -> None:
        self.own_forward = layer.forward
        self.layer = layer
        attention = layer.self_attn
        self.index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.options = observed.options
        widths = (attention.q_proj.out_features, attention.k_proj.out_features)
        self.num_heads, self.num_kv_heads = (int(width) // self.head_dim for width in widths)
        self.head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.may_join = may_join
        self.leaves_sum = False  # to whoever comes next, without gradients

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        pending = getattr(hidden_states, _PENDING, None)
        if len(hidden_states) != 1 or past_key_values is not None or position_embeddings is None:
            return self.own_forward(
                hidden_states if pending is None else hidden_states + pending,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **options,
            )
        from posttrain.policy.fused.ops import Add

        # Modules are looked up at every call: adapters may have been put on them, or taken off.
        layer, attention, mlp = self.layer, self.layer.self_attn, self.layer.mlp
        cos, sin = (angles[0] for angles in position_embeddings)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        x, qkv = self._normed(layer.input_layernorm, hidden_states[0].contiguous(), pending, projections)
        context: Any = active_context()
        if isinstance(qkv, Tensor) and self.head_norms[0] is None and getattr(context, "kernel", None) is not None:
            seen = context.attend_unrotated(self.index, *self._parts(qkv), cos, sin, **self.options)
        else:
            seen = context.attend(self.index, *self._heads(qkv, cos, sin), **self.options)
        delta = self._linear(attention.o_proj, seen.flatten(1)).contiguous()
        x, gate_up = self._normed(layer.post_attention_layernorm, x, delta, (mlp.gate_proj, mlp.up_proj))
        delta = self._down(mlp.down_proj, gate_up).contiguous()
        if self.leaves_sum and not torch.is_grad_enabled():
            out = x[None]
            setattr(out, _PENDING, delta)
            return out
        return Add.apply(x, delta)[None]

    def _product(self, modules: Sequence[nn.Module]) -> Product | None:
        return product_of(modules) if self.may_join else None

    def _normed(
        self, norm: Any, x: Tensor, delta: Tensor | None, modules: Sequence[nn.Module]
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        """(x + delta, what the modules make of its norm): side by side in one tensor, or in one for each."""
        from posttrain.policy.fused.ops import AddNorm, NormedLinear

        if (product := self._product(modules)) is not None:
            total, out = NormedLinear.apply(x, delta, norm.weight, norm.variance_epsilon, product, *product.parts)
            return total, out
        total, y = AddNorm.apply(x, delta, norm.weight, norm.variance_epsilon, norm.weight.dtype)
        return total, [module(y) for module in modules]

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor:
        product = self._product([module])
        if product is None or product.weight.dtype != x.dtype:
            out: Tensor = module(x)
            return out
        return Multiply.apply(x, product, *product.parts)

    def _down(self, module: nn.Module, gate_up: Tensor | list[Tensor]) -> Tensor:
        from posttrain.policy.fused.ops import Swiglu, SwigluLinear

        product = self._product([module])
        if isinstance(gate_up, Tensor) and product is not None and product.weight.dtype == gate_up.dtype:
            return SwigluLinear.apply(gate_up, product, *product.parts)
        gate, up = gate_up if isinstance(gate_up, list) else gate_up.chunk(2, dim=1)
        return self._linear(module, Swiglu.apply(gate, up))

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
                rows = part.reshape(-1, self.head_dim)
                rows = AddNorm.apply(rows, None, norm.weight, norm.variance_epsilon, norm.weight.dtype)[1]
                part = rows.view(part.shape)
            part = Rotate.apply(part.contiguous(), cos, sin, part.shape[1] // self.head_dim)
            turned.append(part)
        return [part.unflatten(1, (-1, self.head_dim)) for part in (*turned, parts[2])]


class FusedNorm:
    """The forward of the norm behind the last layer."""

    def __init__(self, norm: Any) -> None:
        self.own_forward = norm.forward
        self.norm = norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        from posttrain.policy.fused.ops import AddNorm

        pending = getattr(hidden_states, _PENDING, None)
        if hidden_states.dim() != 3 or len(hidden_states) != 1:
            out: Tensor = self.own_forward(hidden_states if pending is None else hidden_states + pending)
            return out
        x = hidden_states[0].contiguous()
        normed: Tensor = AddNorm.apply(x, pending, self.norm.weight, self.norm.variance_epsilon, x.dtype)[1]
        return normed[None]
