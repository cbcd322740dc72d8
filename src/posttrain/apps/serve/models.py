"""Models and adapters by name, loaded for serving. Shared by the server and the chat in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from posttrain.apps.serve.options import LONGEST_UNASKED_TOKENS, EngineOptions
from posttrain.config.generation import NativeConfig
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.errors import InputError
from posttrain.files.json_files import read_json
from posttrain.models.accepted_names import ResolvedModel, resolve_registered_model


@dataclass(frozen=True)
class ServedAdapter:
    folder: Path
    tokenizer: str | None  # folder of its own tokenizer; None if it has none
    model: ResolvedModel

    @property
    def source(self) -> str:
        """Its version in the registry, or its folder."""
        return self.model.text if self.model.registered is not None else str(self.folder)


def find_adapter(
    name: str, text: str, main: ResolvedModel, say: Callable[[str], None], registry: str | None = None
) -> ServedAdapter:
    """The adapter of `--adapter NAME=ADAPTER`, over the main model. The base model that it names is not looked up."""
    found = resolve_registered_model(text, registry=registry, base=main.model)
    if found.adapter is None:
        raise InputError(f"--adapter {name}={text}: there is a whole model, and an adapter is needed")
    trained_on = read_json(found.adapter / "adapter_config.json").get("base_model_name_or_path")
    if trained_on and not _same_place(str(trained_on), main.model):
        say(f"warning: adapter {name} was trained on {trained_on}, and is put on {main.model}")
    own = found.tokenizer if found.tokenizer != found.model else None
    return ServedAdapter(found.adapter, own, found)


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))


def name_of(model: ResolvedModel) -> str:
    """The default name of the model for clients (`--served-model-name`)."""
    if model.registered is not None:
        return model.registered[0]
    if model.kind == "hub":
        return model.model
    if model.checkpoint is not None:
        return f"{model.checkpoint.absolute().parent.name}-{model.checkpoint.name}"
    return Path(model.text).absolute().name


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
