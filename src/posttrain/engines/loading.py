"""The native engine over a model by name, for sampling without training. Shared by eval, serve and chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from posttrain.engines.native.engine import NativeEngine, NativeSettings
from posttrain.models.accepted_names import ResolvedModel, resolve_model
from posttrain.models.loading import load_tokenizer, resolve_device, sampling_dtype
from posttrain.models.lora import load_with_adapter


def load_for_sampling(
    model: ResolvedModel | str,
    *,
    precision: str = "auto",
    device: str = "auto",
    max_total_tokens: int | None = None,
    native_settings: Mapping[str, Any] | None = None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[NativeEngine, PreTrainedTokenizerBase]:
    """The native engine over the model, and its tokenizer. There is no optimizer and nothing needs gradients.

    `precision`: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU). `max_total_tokens` None is the length
    that the model was made for. `native_settings` are the keys of `policy.generation.native_cfg`. `adapt` may change the
    model's modules, for instance put more adapters on it: later is too late, the engine looks modules up once.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve_model(model)
    where = resolve_device(device)
    module = load_with_adapter(resolved, sampling_dtype(precision, where), where)
    module = module if adapt is None else adapt(module)
    tokenizer = load_tokenizer(resolved.tokenizer, f"model {resolved.text!r}")
    length = max_total_tokens or int(getattr(_text_config(module), "max_position_embeddings", 0) or 4096)
    settings = NativeSettings(**dict(native_settings or {}), max_total_tokens=length)
    if where.type == "cuda":
        # As in training: adding the parts of a small matrix product up in bf16 would change the numbers.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return NativeEngine(module, tokenizer, settings), tokenizer


def _text_config(model: nn.Module) -> PretrainedConfig:
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base.config.get_text_config()
