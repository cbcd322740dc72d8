"""Models by whatever name a user gives them, loaded for answering. Shared by the server and the chat in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from posttrain.engines.native.engine import NativeEngine
from posttrain.errors import InputError
from posttrain.models.reference import ModelReference, load_for_sampling, read_json, resolve_model
from posttrain.serve.options import LONGEST_UNASKED_TOKENS, EngineOptions


class ServeError(InputError):
    """Settings of the server that do not fit together."""


@dataclass(frozen=True)
class Found:
    """A model by whatever name the user gave it."""

    text: str
    reference: ModelReference
    registered: tuple[str, int] | None = None  # name and version, if it came from the registry


@dataclass(frozen=True)
class Adapter:
    folder: Path
    tokenizer: str | None  # where its own is; None: it brought none
    found: Found

    @property
    def source(self) -> str:
        """What it is called: its version in the registry, or its folder."""
        return self.found.text if self.found.registered is not None else str(self.folder)


def find_model(text: str, registry: str | None = None, base: str | None = None) -> Found:
    """`registry:` names are looked up and their files compared with their checksums; everything else is a reference.

    `base` takes the place of the base model that an adapter names.
    """
    if not text.startswith("registry:"):
        return Found(text, resolve_model(text, base=base))
    from posttrain.registry import resolve_version

    version = resolve_version(text, registry=registry)
    return Found(version.reference, resolve_model(version.path, base=base), (version.name, version.version))


def find_adapter(name: str, text: str, main: Found, say: Callable[[str], None], registry: str | None = None) -> Adapter:
    """What `--adapter NAME=ADAPTER` names, over the main model: where its own base model is does not matter."""
    found = find_model(text, registry, base=main.reference.model)
    reference = found.reference
    if reference.adapter is None:
        raise ServeError(f"--adapter {name}={text}: there is a whole model, and an adapter is needed")
    trained_on = read_json(reference.adapter / "adapter_config.json").get("base_model_name_or_path")
    if trained_on and not _same_place(str(trained_on), main.reference.model):
        say(f"warning: adapter {name} was trained on {trained_on}, and is put on {main.reference.model}")
    own = reference.tokenizer if reference.tokenizer != reference.model else None
    return Adapter(reference.adapter, own, found)


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))


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
    own = int(getattr(engine.forward.config, "max_position_embeddings", 0) or LONGEST_UNASKED_TOKENS)
    wanted = options.max_model_len or min(own, LONGEST_UNASKED_TOKENS)
    if wanted > own:
        raise ServeError(f"--max-model-len is {wanted}, and {found.text} was made for {own} tokens at most")
    engine.settings = engine.settings.model_copy(update={"max_total_tokens": wanted})
    return engine
