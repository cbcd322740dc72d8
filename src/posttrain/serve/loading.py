"""Builds a service from the options of the command line: resolves and loads models, shares memory, assembles versions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from posttrain.data.chat import ChatFormat
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.kv_cache import GIB
from posttrain.engines.native.session import GenerationSession
from posttrain.errors import InputError
from posttrain.models.accepted_names import ResolvedModel, resolve_registered_model
from posttrain.serve.adapters import AdapterSwitch, load_adapter_tokenizer
from posttrain.serve.canary import CANARY, PRODUCTION, Canary, CanaryRules
from posttrain.serve.models import ServedAdapter, find_adapter, load_engine, name_of
from posttrain.serve.options import EngineOptions, ServeOptions
from posttrain.serve.service import Service, Version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("posttrain.serve")

# For activations and logits of a step, beside weights and KV cache.
_CUDA_RESERVE_GIB = 2.0

Say = Callable[[str], None]


def build_service(options: ServeOptions, say: Say = log.info) -> Service:
    main = resolve_registered_model(options.model, registry=options.registry)
    main_name = options.served_name or name_of(main)
    if main_name in options.adapters:
        raise InputError(f"an adapter and the main model are both called {main_name!r}; see --served-model-name")
    adapters = {name: _adapter(name, text, main, say, options.registry) for name, text in options.adapters.items()}
    canary_is_adapter = options.canary in adapters
    other = None
    if options.canary and not canary_is_adapter:
        other = resolve_registered_model(options.canary, registry=options.registry)
    # Before loading weights: incompatible tokenizers are reported in seconds, not after minutes.
    tokenizers = {name: load_adapter_tokenizer(name, adapter, main, say) for name, adapter in adapters.items()}

    say(f"loading {main.text}")
    switch = AdapterSwitch({name: adapter.folder for name, adapter in adapters.items()})
    engines = [load_engine(main, options.engine, switch.add_to)]
    if other is not None:
        say(f"loading {other.text} as canary")
        engines.append(load_engine(other, options.engine))
    changes = {"max_total_tokens": _common_length(engines, say), **_memory_share(engines, options.engine)}
    sessions = [
        GenerationSession(engine, activate, engine.settings.model_copy(update=changes))
        for engine, activate in zip(engines, (switch.activate, None), strict=False)
    ]

    def version(name: str, source: str, session: GenerationSession) -> Version:
        return Version(name, source, session, session.tokenizer, ChatFormat(session.tokenizer))

    production = version(PRODUCTION, main.text, sessions[0])
    models = {main_name: production}
    models |= {name: _adapted(production, name, adapter, tokenizers[name]) for name, adapter in adapters.items()}
    canary, canary_version = None, None
    if options.canary is not None:
        canary_version = (
            replace(models[options.canary], name=CANARY, source=f"adapter {options.canary}")
            if canary_is_adapter
            else version(CANARY, other.text if other else "", sessions[1])
        )
        found = adapters[options.canary].model if canary_is_adapter else other
        canary = Canary(options.canary_rules or CanaryRules(), _on_rollback(found, options.registry, say))
    limits = replace(options.limits, max_samples=min(options.limits.max_samples, options.engine.max_batch_size))
    return Service(
        models, limits, canary=canary, canary_version=canary_version, api_keys=options.api_keys, no_auth=options.no_auth
    )


def _adapter(name: str, text: str, main: ResolvedModel, say: Say, registry: str | None) -> ServedAdapter:
    if name in (PRODUCTION, CANARY):
        raise InputError(
            f"--adapter {name}: {PRODUCTION} and {CANARY} name versions of the main model; take another name"
        )
    return find_adapter(name, text, main, say, registry)


def _adapted(base: Version, name: str, adapter: ServedAdapter, tokenizer: PreTrainedTokenizerBase | None) -> Version:
    """With the chat template of the adapter, if it has one."""
    version = replace(base, name=name, source=adapter.source, adapter=name)
    return version if tokenizer is None else replace(version, tokenizer=tokenizer, chat=ChatFormat(tokenizer))


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
    if not 0 < options.gpu_memory_utilization <= 1:
        raise InputError(
            f"--gpu-memory-utilization is {options.gpu_memory_utilization}: above 0 and at most 1 is accepted"
        )
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    usable = (options.gpu_memory_utilization * total - (total - free)) / GIB - _CUDA_RESERVE_GIB
    if usable <= 0:
        raise InputError(
            f"the models leave {free / GIB:.1f} of {total / GIB:.1f} GiB, and --gpu-memory-utilization "
            f"{options.gpu_memory_utilization} allows nothing of it for the KV cache"
        )
    return {"kv_cache_gib": usable / len(engines)}


def _on_rollback(canary: ResolvedModel | None, registry: str | None, say: Say) -> Callable[[str], None]:
    """Report the rollback. A canary from the registry is also removed from its stage there, in a thread."""

    def write(name: str, number: int, reason: str) -> None:
        from posttrain.registry import Registry

        try:
            store = Registry(registry)
            if store.get(name, number).stage == CANARY:
                store.rollback(name, stage=CANARY, why=f"rolled back by the server: {reason}", by="posttrain serve")
                say(f"registry: version {number} of {name} is no longer a canary")
        except Exception as error:
            log.error("the rollback could not be written to the registry: %s", error)

    def on_rollback(reason: str) -> None:
        say(f"canary rolled back: {reason}")
        if canary is not None and canary.registered is not None:
            threading.Thread(target=write, args=(*canary.registered, reason), daemon=True).start()

    return on_rollback
