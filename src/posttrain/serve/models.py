"""Models by whatever name a user gives them, loaded for answering. Shared by the server and the chat in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from posttrain.errors import InputError
from posttrain.export.model_reference import ModelReference, load_for_sampling, resolve_model
from posttrain.generation.native.engine import NativeEngine

_DEFAULT_LONGEST = 8192


class ServeError(InputError):
    """Settings of the server that do not fit together."""


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine; none of them changes an answer."""

    precision: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # None: the model's own, at most 8192
    max_batch_size: int = 64
    max_prefill_tokens: int = 4096
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Found:
    """A model by whatever name the user gave it."""

    text: str
    reference: ModelReference
    registered: tuple[str, int] | None = None  # name and version, if it came from the registry


def find_model(text: str, registry: str | None = None) -> Found:
    """`registry:` names are looked up and their files compared with their checksums; everything else is a reference."""
    if not text.startswith("registry:"):
        return Found(text, resolve_model(text))
    from posttrain.registry import resolve_version

    version = resolve_version(text, registry=registry)
    return Found(version.reference, resolve_model(version.path), (version.name, version.version))


def name_of(found: Found) -> str:
    """What clients call the model unless the user says otherwise."""
    if found.registered is not None:
        return found.registered[0]
    reference = found.reference
    if reference.kind == "hub":
        return reference.model
    if reference.checkpoint is not None:
        return f"{reference.checkpoint.absolute().parent.name}-{reference.checkpoint.name}"
    return Path(reference.text).absolute().name


def load_engine(
    found: Found, options: EngineOptions, adapt: Callable[[nn.Module], nn.Module] | None = None
) -> NativeEngine:
    """`adapt` puts adapters on the model before the engine sees it."""
    native = {
        "max_batch_size": options.max_batch_size,
        "max_prefill_tokens": options.max_prefill_tokens,
        "kv_cache_gib": options.kv_cache_gib,
    }
    engine, _ = load_for_sampling(
        found.reference,
        precision=options.precision,
        device=options.device,
        max_total_tokens=options.max_model_len,
        native_settings=native,
        adapt=adapt,
    )
    own = int(getattr(engine.forward.config, "max_position_embeddings", 0) or _DEFAULT_LONGEST)
    wanted = options.max_model_len or min(own, _DEFAULT_LONGEST)
    if wanted > own:
        raise ServeError(f"--max-model-len is {wanted}, and {found.text} was made for {own} tokens at most")
    engine.settings = replace(engine.settings, max_total_tokens=wanted)
    return engine
