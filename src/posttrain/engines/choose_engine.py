"""Selects the engine: for a rank that trains, and for a model by name (eval, serve, chat)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from posttrain.config import PolicyConfig
from posttrain.config.policy import NativeConfig
from posttrain.engines.native.engine import NativeEngine, NativeSettings
from posttrain.engines.native.proof import prove_for_sampling
from posttrain.engines.vllm.sampler import VllmSampler
from posttrain.models.accepted_names import ResolvedModel, resolve_model
from posttrain.models.loading import load_tokenizer, resolve_device, sampling_dtype
from posttrain.models.lora import load_with_adapter
from posttrain.policy.head import without_adapter_wrapper
from posttrain.roles import RankEngine


def engine_for_training(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig, device: torch.device
) -> RankEngine | None:
    """The engine that samples from the trained modules or from their weights; None if the run does not sample."""
    if policy.generation is None:
        return None
    if policy.generation.uses_vllm:
        return VllmSampler(model, tokenizer, policy, device)
    settings = NativeSettings(
        **policy.generation.native_cfg.model_dump(),
        max_total_tokens=policy.max_total_sequence_length,
        deterministic=policy.deterministic,
        records_routes=policy.router_replay.enabled,
    )
    return NativeEngine(model, tokenizer, settings)


def load_for_sampling(
    model: ResolvedModel | str,
    *,
    precision: str = "auto",
    device: str = "auto",
    max_total_tokens: int | None = None,
    longest_default: int | None = None,
    native: NativeConfig | None = None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[NativeEngine, PreTrainedTokenizerBase]:
    """The native engine over the model, and its tokenizer. No optimizer, no gradients.

    `precision`: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU). `max_total_tokens` None: the model's
    maximum length, at most `longest_default`. `adapt` may change the model's modules, for instance add adapters, before
    the engine inspects them.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve_model(model)
    where = resolve_device(device)
    module = load_with_adapter(resolved, sampling_dtype(precision, where), where)
    module = module if adapt is None else adapt(module)
    tokenizer = load_tokenizer(resolved.tokenizer, f"model {resolved.text!r}")
    text_config: PretrainedConfig = without_adapter_wrapper(module).config.get_text_config()
    length = int(getattr(text_config, "max_position_embeddings", 0) or longest_default or 4096)
    if longest_default is not None:
        length = min(length, longest_default)
    settings = NativeSettings(**(native or NativeConfig()).model_dump(), max_total_tokens=max_total_tokens or length)
    if where.type == "cuda":
        # As in training: summing partial products in bf16 would change the numbers.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    prove_for_sampling(module, tokenizer)
    return NativeEngine(module, tokenizer, settings), tokenizer
