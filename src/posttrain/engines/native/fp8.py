"""Sampling in FP8: whether it can be had here, which layers it is for, and what their KV cache holds.

The products are in `policy/fused/fp8.py`, quantised keys and values in `kv_cache.py` and `kernels/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from posttrain.config.generation import NativeConfig
from posttrain.engines.native.forward import ForwardPass
from posttrain.errors import InputError
from posttrain.policy.fused.fp8 import Fp8Weights
from posttrain.policy.model_support import LayerShape

_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper have FP8 matrix units


def check_fp8(forward: ForwardPass, settings: NativeConfig, *, num_fused: int, is_sharded: bool) -> None:
    """Refuse FP8 where the device or the model does not allow it; `num_fused` layers of the model are fused."""
    if settings.precision != "fp8":
        return
    if (obstacle := _obstacle(forward, num_fused, is_sharded)) is not None:
        raise InputError(f"native_cfg.precision = fp8: {obstacle}; use precision = auto")
    num_layers = int(forward.config.num_hidden_layers)
    if settings.num_first_layers_in_bf16 + settings.num_last_layers_in_bf16 >= num_layers:
        raise InputError(
            f"native_cfg.precision = fp8: num_first_layers_in_bf16 = {settings.num_first_layers_in_bf16} and "
            f"num_last_layers_in_bf16 = {settings.num_last_layers_in_bf16} leave none of the {num_layers} layers"
        )


def _obstacle(forward: ForwardPass, num_fused: int, is_sharded: bool) -> str | None:
    device, dtype = forward.device, next(forward.head.decoder.parameters()).dtype
    if device.type != "cuda":
        return f"it needs a GPU with FP8 matrix units (Ada, Hopper or newer), and the model is on {device.type}"
    if torch.version.hip is not None:
        return "its kernels are for GPUs of NVIDIA"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} (compute capability {capability[0]}.{capability[1]}) has no FP8 matrix units; Ada (8.9), Hopper (9.0) "
            "and newer ones have"
        )
    if dtype != torch.bfloat16:
        return f"weights in bfloat16 are quantised, and these are {str(dtype).removeprefix('torch.')}"
    if is_sharded:
        return "weights that are sharded over GPUs cannot be quantised yet"
    if num_fused < forward.config.num_hidden_layers:
        return (
            f"{num_fused} of {forward.config.num_hidden_layers} layers of {forward.config.model_type} follow the pattern of "
            "Llama whose products can be quantised"
        )
    return None


def fp8_weights(forward: ForwardPass, settings: NativeConfig) -> Fp8Weights | None:
    """Copies of the weights, quantised now; None where sampling uses the weights themselves."""
    if settings.precision != "fp8":
        return None
    decoder: Any = forward.head.decoder
    layers: list[nn.Module] = list(decoder.layers)
    copies = Fp8Weights(layers[slice(*_range(settings, len(layers)))])
    copies.refresh()
    return copies


def cache_layers(forward: ForwardPass, settings: NativeConfig) -> dict[int, LayerShape]:
    """What each layer keeps of a token: FP8 where its products are in FP8 and nothing else was asked for."""
    layers = forward.layers()
    if settings.precision != "fp8" or settings.kv_cache_dtype == "bfloat16":
        return layers
    begin, end = _range(settings, len(layers))
    return {
        layer: replace(shape, dtype=torch.float8_e4m3fn) if begin <= layer < end else shape
        for layer, shape in layers.items()
    }


def _range(settings: NativeConfig, num_layers: int) -> tuple[int, int]:
    return settings.num_first_layers_in_bf16, num_layers - settings.num_last_layers_in_bf16
