"""Loads the models of a server, with their adapters, and shares the memory among their KV caches. Runs on the engine's
side; the chat in the terminal loads its model in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from posttrain.apps.serve.adapters import AdapterSwitch
from posttrain.apps.serve.options import LONGEST_UNASKED_TOKENS, EngineOptions
from posttrain.config.policy import NativeConfig
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.kv_cache import GIB
from posttrain.engines.native.session import GenerationSession
from posttrain.errors import InputError
from posttrain.models.accepted_names import ResolvedModel

# For activations and logits of a step, beside weights and KV cache.
_CUDA_RESERVE_GIB = 2.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelsToLoad:
    main: ResolvedModel
    adapters: Mapping[str, Path]  # over the main model, by name
    canary: ResolvedModel | None  # a second model; an adapter is none
    options: EngineOptions


def name_of(model: ResolvedModel) -> str:
    """The default name of the model for clients (`--served-model-name`)."""
    if model.registered is not None:
        return model.registered[0]
    if model.kind == "hub":
        return model.model
    if model.checkpoint is not None:
        return f"{model.checkpoint.absolute().parent.name}-{model.checkpoint.name}"
    return Path(model.text).absolute().name


def load_sessions(models: ModelsToLoad, say: Say) -> list[GenerationSession]:
    """One session for the main model with its adapters, and one for a canary with separate weights."""
    say(f"loading {models.main.text}")
    switch = AdapterSwitch(models.adapters)
    engines = [load_engine(models.main, models.options, switch.add_to)]
    if models.canary is not None:
        say(f"loading {models.canary.text} as canary")
        engines.append(load_engine(models.canary, models.options))
    changes = {"max_total_tokens": _common_length(engines, say), **_memory_share(engines, models.options)}
    return [
        GenerationSession(
            engine,
            activate,
            engine.settings.model_copy(update=changes),
            keeps_prefixes=models.options.prefix_cache,
        )
        for engine, activate in zip(engines, (switch.activate, None), strict=False)
    ]


def _common_length(engines: Sequence[NativeEngine], say: Say) -> int:
    """The shortest context: whether a request fits must not depend on the version that it is routed to."""
    lengths = [engine.settings.max_total_tokens for engine in engines]
    if len(set(lengths)) > 1:
        say(f"production takes {lengths[0]} tokens and the canary {lengths[1]}: both get {min(lengths)}")
    return min(lengths)


def _memory_share(engines: Sequence[NativeEngine], options: EngineOptions) -> dict[str, float]:
    """On a GPU, with every model loaded: the usable memory is shared evenly among the KV caches."""
    device = engines[0].forward.device
    if device.type != "cuda" or options.kv_cache_gib is not None:
        return {}
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    usable = (options.gpu_memory_utilization * total - (total - free)) / GIB - _CUDA_RESERVE_GIB
    if usable <= 0:
        raise InputError(
            f"the models leave {free / GIB:.1f} of {total / GIB:.1f} GiB, and --gpu-memory-utilization "
            f"{options.gpu_memory_utilization} allows nothing of it for the KV cache"
        )
    return {"kv_cache_gib": usable / len(engines)}


def load_engine(
    model: ResolvedModel, options: EngineOptions, adapt: Callable[[nn.Module], nn.Module] | None = None
) -> NativeEngine:
    """`adapt` adds adapters to the model before the engine is built."""
    native = NativeConfig(
        max_batch_size=options.max_batch_size,
        max_prefill_tokens=options.max_prefill_tokens,
        kv_cache_gib=options.kv_cache_gib,
    )
    engine, _ = load_for_sampling(
        model,
        precision=options.precision,
        device=options.device,
        max_total_tokens=options.max_model_len,
        longest_default=LONGEST_UNASKED_TOKENS,
        native=native,
        adapt=adapt,
    )
    own = int(getattr(engine.forward.config, "max_position_embeddings", 0) or LONGEST_UNASKED_TOKENS)
    if (length := engine.settings.max_total_tokens) > own:
        raise InputError(f"--max-model-len is {length}, and {model.text} was made for {own} tokens at most")
    return engine
