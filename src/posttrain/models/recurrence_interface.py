"""The recurrent layers of a model, computed by the active context as its attention is.

A gated delta net, a Mamba-2 mixer and a short convolution link the tokens of a sequence by two operations: a causal
convolution over the last few tokens, and a linear recurrence over a matrix. `transformers` computes them with functions
of the model's own module, under the same names in every family. `route_recurrent_layers` replaces these by functions
that pass the projected values to the active `AttentionContext`, which knows what the tokens of a row are: packed
sequences while training, one token each of many sequences while decoding. Without an active context they compute what
they did before.

The recurrence of all families is, for each head, with a state S of [key width, value width]:

    S <- exp(log_decay) S
    S <- S + key (beta (value - key S))^T        gated delta rule
    S <- S + key value^T                         Mamba-2, where key is B, query is C and value is the input times dt
    out = query S
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.errors import InputError
from posttrain.models.attention_interface import Place, active_context, is_idle, named_layer

_uses_originals = False
_current: list[int] = [-1, 0]  # the layer that is running, and the number of its operations so far
_running: list[nn.Module] = []  # its module


def route_recurrent_layers(model: nn.Module) -> None:
    """Let the active context compute the recurrent layers of `model`."""
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if not (convolves and hasattr(module, "layer_idx") and "causal_conv1d_fn" in names):
            continue
        if _note_layer not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_note_layer)
        for name, replacement in _REPLACEMENTS.items():
            if name in names and not hasattr(names[name], "replaced_by_posttrain"):
                names[name] = _unless_active(names[name], replacement)


@contextmanager
def recurrence_of_transformers() -> Iterator[None]:
    """The functions of transformers inside, whatever the context: a second way to compute a single sequence."""
    global _uses_originals
    _uses_originals = True
    try:
        yield
    finally:
        _uses_originals = False


def _note_layer(module: nn.Module, _arguments: object) -> None:
    _current[:] = [module.layer_idx, 0]  # type: ignore[list-item]
    _running[:] = [module]


def _next_place() -> Place:
    layer, operation = _current
    _current[1] += 1
    return layer, operation


def _unless_active(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: object, **kwargs: object) -> Any:
        return (original if is_idle() or _uses_originals else replacement)(*args, **kwargs)

    compute.replaced_by_posttrain = True  # type: ignore[attr-defined]
    return compute


def _convolve(
    hidden_states: Tensor,  # [1, channels, tokens]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    silu = activation in ("silu", "swish")
    # Not `[0]`: its gradient would be contiguous over tokens, and cuBLAS is slow on such unaligned rows.
    out = active_context().convolve(_next_place(), hidden_states.squeeze(0).T, weight, bias, silu=silu)
    if activation is not None and not silu:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype).T[None]


def _gated_delta_rule(
    query: Tensor,  # [1, tokens, key heads, key width]
    key: Tensor,
    value: Tensor,  # [1, tokens, heads, value width]
    g: Tensor,  # [1, tokens, heads]
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    q, k, v, decay, rate = (x.squeeze(0) for x in (query, key, value, g, beta))
    if not use_qk_l2norm_in_kernel:
        q = q.to(_exact_type(q)) * q.shape[-1] ** -0.5
    out = active_context().recur(_next_place(), q, k.to(q.dtype), v, decay, rate, unit=use_qk_l2norm_in_kernel)
    return out.to(query.dtype)[None], None


def _mamba2(
    hidden_states: Tensor,  # [1, tokens, heads, value width]
    dt: Tensor,  # [1, tokens, heads]
    A: Tensor,  # [heads]
    B: Tensor,  # [1, tokens, groups, key width]
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> Tensor:
    exact = _exact_type(hidden_states)
    values, step, keys, queries = (x.squeeze(0) for x in (hidden_states.to(exact), dt.to(exact), B, C))
    step = step if dt_bias is None else step + dt_bias.to(exact)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    out = active_context().recur(_next_place(), queries, keys, values * step[..., None], A.to(exact) * step, None)
    return (out if D is None else out + D[:, None].to(exact) * values)[None]


def _exact_type(like: Tensor) -> torch.dtype:
    """A state is summed up over thousands of tokens: fp32 at least."""
    return torch.promote_types(like.dtype, torch.float32)


def _refuse(*_: object, **__: object) -> None:
    raise InputError(
        f"{named_layer(_running[0])} decays every number of its state by itself, as Mamba of the first kind and Kimi's "
        "delta attention do; posttrain computes gated delta rules, Mamba-2 and short convolutions"
    )


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # its caller then goes on step by step
    **dict.fromkeys(("mamba_inner_fn", "mamba_selective_scan", "chunk_kimi_delta_attention"), _refuse),
}
