"""FP8 sampling: whether it is supported, which layers use it, and the format of their KV cache.

The products are in `policy/fused/fp8.py`, quantised keys and values in `kv_cache.py` and `kernels/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from posttrain.config.policy import NativeConfig
from posttrain.engines.native.forward import ForwardPass
from posttrain.errors import InputError
from posttrain.policy.fused.fp8 import Fp8Weights, fp8_obstacle
from posttrain.policy.model_support import LayerShape
from posttrain.policy.runtime import triton_kernels


def check_fp8(forward: ForwardPass, settings: NativeConfig, *, num_fused: int, is_sharded: bool) -> None:
    """Reject FP8 if the device or the model does not support it; `num_fused` layers of the model are fused."""
    if settings.precision != "fp8":
        return
    layers = list(forward.head.layers)
    obstacle = fp8_obstacle(
        forward.device,
        next(forward.head.decoder.parameters()).dtype,
        model_type=forward.config.model_type,
        layers=layers,
        num_fused=num_fused,
        is_sharded=is_sharded,
    )
    if obstacle is not None:
        raise InputError(f"native_cfg.precision = fp8: {obstacle}; use precision = auto")
    if settings.num_first_layers_in_bf16 + settings.num_last_layers_in_bf16 >= len(layers):
        raise InputError(
            f"native_cfg.precision = fp8: num_first_layers_in_bf16 = {settings.num_first_layers_in_bf16} and "
            f"num_last_layers_in_bf16 = {settings.num_last_layers_in_bf16} leave none of the {len(layers)} layers"
        )


def fp8_weights(forward: ForwardPass, settings: NativeConfig) -> Fp8Weights | None:
    """Quantised copies of the current weights; None if sampling uses the weights themselves."""
    if settings.precision != "fp8":
        return None
    decoder: Any = forward.head.decoder
    layers: list[nn.Module] = list(decoder.layers)
    copies = Fp8Weights(layers[slice(*_range(settings, len(layers)))], defers=True)
    copies.refresh()
    return copies


def cache_layers(forward: ForwardPass, settings: NativeConfig) -> dict[int, LayerShape]:
    """The KV cache format of each layer: FP8 if its matrix products are in FP8 and no other format is configured,
    latent vectors where decode steps attend to them.
    """
    layers = dict(forward.shapes().layers)
    for layer, shape in layers.items():
        if shape.expanded is not None and not attends_to_latents(forward.device, shape, settings):
            layers[layer] = shape.expanded
    if settings.precision != "fp8" or settings.kv_cache_dtype == "bfloat16":
        return layers
    begin, end = _range(settings, len(layers))
    return {
        layer: replace(shape, dtype=torch.float8_e4m3fn) if begin <= layer < end else shape
        for layer, shape in layers.items()
    }


def attends_to_latents(device: torch.device, shape: LayerShape, settings: NativeConfig) -> bool:
    """On a GPU where their kernel does. On a CPU not in 16 bits, where the trainer rounds keys and values that decode
    steps do not make.
    """
    if device.type != "cuda":
        return shape.dtype.itemsize > 2
    kernels, heads = triton_kernels("engines.native.kernels"), shape.expanded
    assert heads is not None
    return kernels is not None and kernels.latent_fits(
        device, shape.dtype, heads.num_heads, shape.value_dim, shape.key_dim, settings.page_size
    )


def _range(settings: NativeConfig, num_layers: int) -> tuple[int, int]:
    return settings.num_first_layers_in_bf16, num_layers - settings.num_last_layers_in_bf16
