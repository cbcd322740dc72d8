"""Builds a service from the options of the command line: resolves models, has them loaded, assembles versions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.apps.serve.adapters import ServedAdapter, find_adapter, load_adapter_tokenizer
from posttrain.apps.serve.canary import CANARY, PRODUCTION, Canary, CanaryRules
from posttrain.apps.serve.engine_client import EngineClient
from posttrain.apps.serve.engine_host import EngineHost, EngineProcess, EngineThread
from posttrain.apps.serve.options import ServeOptions
from posttrain.apps.serve.service import Service, Version
from posttrain.apps.serve.sessions import ModelsToLoad, Say, name_of
from posttrain.data.chat import ChatFormat
from posttrain.errors import InputError
from posttrain.models.accepted_names import ResolvedModel, resolve_registered_model
from posttrain.models.loading import expand_images_for, load_tokenizer, resolve_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("posttrain.serve")


MAX_NAME_CHARACTERS = 200  # of an adapter


def build_service(options: ServeOptions, say: Say = log.info) -> Service:
    processes = options.processes or (2 if resolve_device(options.engine.device).type == "cuda" else 1)
    host = EngineThread() if processes == 1 else EngineProcess()  # its imports run in parallel
    try:
        return _service(host, options, say)
    except BaseException:
        host.stop(0)
        raise


def _service(host: EngineHost, options: ServeOptions, say: Say) -> Service:
    main = resolve_registered_model(options.model, registry=options.registry)
    main_name = options.served_name or name_of(main)
    if main_name in options.adapters:
        raise InputError(f"an adapter and the main model are both called {main_name!r}; see --served-model-name")
    for name in options.adapters:
        if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isascii() and name.isprintable()):
            # Names are in the header of each answer and in the metrics.
            raise InputError(
                f"--adapter {name[:MAX_NAME_CHARACTERS]!r}: a name has 1 to {MAX_NAME_CHARACTERS} printable ASCII "
                "characters"
            )
    for name in {PRODUCTION, CANARY} & set(options.adapters):
        raise InputError(
            f"--adapter {name}: {PRODUCTION} and {CANARY} name versions of the main model; take another name"
        )
    adapters = {name: find_adapter(name, text, main, say, options.registry) for name, text in options.adapters.items()}
    canary_is_adapter = options.canary in adapters
    other = None
    if options.canary and not canary_is_adapter:
        other = resolve_registered_model(options.canary, registry=options.registry)
    # Before loading weights: incompatible tokenizers are reported in seconds, not after minutes.
    tokenizers = {name: load_adapter_tokenizer(name, adapter, main, say) for name, adapter in adapters.items()}
    own = [load_tokenizer(model.tokenizer, f"model {model.text!r}") for model in (main, other) if model is not None]

    models_to_load = ModelsToLoad(main, {name: one.folder for name, one in adapters.items()}, other, options.engine)
    engine = EngineClient(host, host.load(models_to_load, say))

    def version(name: str, model: ResolvedModel, index: int) -> Version:
        chat = ChatFormat(own[index])
        chat.image_tokens = expand_images_for(model.model, own[index], f"model {model.text!r}")
        return Version(name, model.text, engine.sessions[index], own[index], chat)

    production = version(PRODUCTION, main, 0)
    models = {main_name: production}
    models |= {name: _adapted(production, name, adapter, tokenizers[name]) for name, adapter in adapters.items()}
    canary, canary_version = None, None
    if options.canary is not None:
        canary_version = (
            replace(models[options.canary], name=CANARY, source=f"adapter {options.canary}")
            if other is None
            else version(CANARY, other, 1)
        )
        found = adapters[options.canary].model if canary_is_adapter else other
        canary = Canary(options.canary_rules or CanaryRules(), _on_rollback(found, options.registry, say))
    limits = replace(options.limits, max_samples=min(options.limits.max_samples, options.engine.max_batch_size))
    return Service(
        engine,
        models,
        limits,
        canary=canary,
        canary_version=canary_version,
        api_keys=options.api_keys,
        no_auth=options.no_auth,
    )


def _adapted(base: Version, name: str, adapter: ServedAdapter, tokenizer: PreTrainedTokenizerBase | None) -> Version:
    """With the chat template of the adapter, if it has one."""
    version = replace(base, name=name, source=adapter.source, adapter=name)
    if tokenizer is None:
        return version
    chat = ChatFormat(tokenizer)
    chat.image_tokens = base.chat.image_tokens
    return replace(version, tokenizer=tokenizer, chat=chat)


def _on_rollback(canary: ResolvedModel | None, registry: str | None, say: Say) -> Callable[[str], None]:
    """Report the rollback. A canary from the registry is also removed from its stage there, in a thread."""

    def write(name: str, number: int, reason: str) -> None:
        from posttrain.apps.ship.registry import Registry

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
