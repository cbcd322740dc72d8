"""Resolves model names to files. Shared by eval, gate, serve, chat and pipeline.

    models/smollm2-135m-instruct      a Hugging Face folder
    results/adapter                   a peft adapter; its own config names the base model
    results/grpo/step_60              a checkpoint, full or LoRA; a folder below it, such as policy/weights, means it
    results/grpo                      a run: its newest complete checkpoint
    Qwen/Qwen3-0.6B                   a name on the model hub
    registry:NAME@production          a version in the model registry (`resolve_registered_model` only)

`resolve_model` reads names and small files only. It fetches nothing and does not import torch. URLs of servers are
handled by the callers.

The registry is built on this package, so its names are looked up by a function that `posttrain.apps.ship.registry`
passes to `connect_registry` when it is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from posttrain.checkpointing import CheckpointStore
from posttrain.checkpointing.integrity import CHECKSUMS, find_damage
from posttrain.errors import InputError
from posttrain.files.digests import digest, hash_files
from posttrain.files.json_files import read_json
from posttrain.models.folder_checks import refuse_pipes, why_unusable
from posttrain.models.hub import NEMO_ARCHIVE, looks_like_hub_name

if TYPE_CHECKING:
    from posttrain.config import LoadedConfig, RunConfig


WEIGHTS = Path("policy/weights/model")
TOKENIZER = Path("policy/tokenizer")
ACCEPTED = (
    "a Hugging Face folder, a peft adapter folder, a checkpoint (step_N), the folder of a run, or a hub name such as "
    "Qwen/Qwen3-0.6B"
)
REGISTRY_PREFIX = "registry:"
_STEP = re.compile(r"step_(\d+)")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")

Kind = Literal["folder", "adapter", "checkpoint", "hub"]


class ModelReferenceError(InputError):
    """A name that does not resolve to a model."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be loaded: `model` with plain transformers, then `adapter` on top of it with peft."""

    text: str  # as the user wrote it; of a version in the registry, registry:NAME@NUMBER
    kind: Kind
    model: str  # folder or hub name of the weights; with an adapter, of the base model
    tokenizer: str  # folder or hub name
    adapter: Path | None = None
    step: int | None = None  # of a checkpoint
    checkpoint: Path | None = None  # the folder step_N
    run_folder: Path | None = None  # the folder that holds step_N
    registered: tuple[str, int] | None = None  # name and version in the registry

    @property
    def files(self) -> Path | None:
        """The folder of the adapter, or of the weights; None for a model on the hub."""
        if self.adapter is not None:
            return self.adapter
        return None if self.kind == "hub" else Path(self.model)


def resolve_model(reference: str | Path, *, base: str | None = None) -> ResolvedModel:
    """The model that `reference` names. `base` overrides the base model that an adapter names, e.g. after it was
    moved."""
    text = str(reference)
    if not text.strip():
        raise ModelReferenceError(f"the name of the model is empty; accepted: {ACCEPTED}")
    if re.match(r"[a-z]+://|registry:", text):
        raise ModelReferenceError(f"{text!r} is not a model that can be loaded here; accepted: {ACCEPTED}")
    path = Path(text).expanduser()
    if path.is_dir():
        return _resolve_folder(text, path, base)
    if path.suffix == ".nemo":
        raise ModelReferenceError(f"{text!r} is a {NEMO_ARCHIVE}; accepted: {ACCEPTED}")
    if path.is_file():
        hint = "; `posttrain models` and `transformers` import GGUF files" if path.suffix == ".gguf" else ""
        raise ModelReferenceError(f"{text!r} is a file; accepted: {ACCEPTED}{hint}")
    if looks_like_hub_name(text):
        return ResolvedModel(text=text, kind="hub", model=text, tokenizer=text)
    raise ModelReferenceError(f"no folder {text!r}; accepted: {ACCEPTED}")


class RegisteredVersion(Protocol):
    """A version in the model registry, whose files are at `path`."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def path(self) -> Path: ...


RegistryLookup = Callable[[str, str | None], RegisteredVersion]  # the name, and where the registry is (None: default)
_registry_lookup: RegistryLookup | None = None


def connect_registry(lookup: RegistryLookup) -> None:
    """Let `resolve_registered_model` look names up with this function."""
    global _registry_lookup
    _registry_lookup = lookup


def resolve_registered_model(text: str, *, registry: str | None = None, base: str | None = None) -> ResolvedModel:
    """Like `resolve_model`, and also `registry:` names: the version they currently resolve to, with verified
    checksums."""
    if not text.startswith(REGISTRY_PREFIX):
        return resolve_model(text, base=base)
    if _registry_lookup is None:
        raise ModelReferenceError(f"{text!r} needs the model registry: import posttrain.apps.ship.registry first")
    version = _registry_lookup(text, registry)
    found = resolve_model(version.path, base=base)
    name, number = version.name, version.version
    return replace(found, text=f"{REGISTRY_PREFIX}{name}@{number}", registered=(name, number))


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path | None:
    """The folder step_N: `path` itself, a parent of it (`step_N/policy/weights`), or the newest in a run's folder."""
    if (path / "policy" / "weights").is_dir():
        return path
    absolute = path.absolute()
    for inner in ("policy", "policy/weights", "policy/weights/model"):
        depth = len(Path(inner).parts)
        if absolute.parts[-depth:] == Path(inner).parts and _STEP.fullmatch(absolute.parents[depth - 1].name):
            return path.parents[depth - 1] if len(path.parts) > depth else absolute.parents[depth - 1]
    return _newest_checkpoint(path, say)


def _newest_checkpoint(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    store = CheckpointStore(run_folder, say=say)
    steps = store.steps()
    if not steps:
        return None
    newest = run_folder / f"step_{steps[-1]}"
    if newest.is_dir() and not (newest / CHECKSUMS).exists() and not (newest / "policy" / "model.json").exists():
        return newest  # written by another system, without checksums
    found = store.latest()
    if found is None:
        raise ModelReferenceError(
            f"{run_folder}: none of its checkpoints ({', '.join(f'step_{step}' for step in steps)}) is whole"
        )
    return found


def _resolve_folder(text: str, path: Path, base: str | None) -> ResolvedModel:
    checkpoint = find_checkpoint(path, partial(print, file=sys.stderr))
    if checkpoint is not None:
        return _resolve_checkpoint(text, checkpoint, base)
    if (path / "adapter_config.json").is_file():
        model = base or adapter_base(path)
        tokenizer = str(path) if (path / "tokenizer_config.json").is_file() else model
        return ResolvedModel(text=text, kind="adapter", model=model, tokenizer=tokenizer, adapter=path)
    check_model_folder(path)
    return ResolvedModel(text=text, kind="folder", model=str(path), tokenizer=str(path))


def _resolve_checkpoint(text: str, checkpoint: Path, base: str | None) -> ResolvedModel:
    if (checkpoint / CHECKSUMS).exists() and (
        problems := find_damage(checkpoint, contents=False, below="policy/weights")
    ):
        raise ModelReferenceError(f"{checkpoint} is damaged: {'; '.join(problems[:3])}")
    weights = checkpoint / WEIGHTS
    tokenizer = checkpoint / TOKENIZER
    adapter = weights if (weights / "adapter_config.json").is_file() else None
    if adapter is not None:
        model = base or adapter_base(adapter)
    else:
        if not (weights / "config.json").is_file():
            raise ModelReferenceError(
                f"{checkpoint}: its weights are not in the Hugging Face format. Convert them first: "
                f"posttrain convert {checkpoint} --to FOLDER"
            )
        check_model_folder(weights)
        model = str(weights)
    match = _STEP.search(checkpoint.name)
    return ResolvedModel(
        text=text,
        kind="checkpoint",
        model=model,
        tokenizer=str(tokenizer) if tokenizer.is_dir() else model,
        adapter=adapter,
        step=int(match[1]) if match else None,
        checkpoint=checkpoint,
        run_folder=checkpoint.parent,
    )


def check_model_folder(path: Path) -> None:
    """Raise unless the folder has a config and every weight file that its index names."""
    if not (path / "config.json").is_file():
        raise ModelReferenceError(
            f"{path} is a folder without config.json, adapter_config.json or step_N; accepted: {ACCEPTED}"
        )
    if (reason := why_unusable(path)) is not None:
        raise ModelReferenceError(reason)
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ModelReferenceError(f"{path} has a config.json but no weights (*.safetensors or pytorch_model.bin)")
    for index in sorted(path.glob("*.index.json")):
        named = files_of_index(index)
        if lacking := [name for name in named if not (path / name).is_file()]:
            raise ModelReferenceError(f"{path}: {index.name} names {len(named)} files, and {lacking[0]} is missing")


def files_of_index(index: Path) -> list[str]:
    """The weight files that the index of a model in several files names."""
    content = read_json(index, ModelReferenceError).get("weight_map")
    names = content.values() if isinstance(content, dict) else ()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelReferenceError(
            f"{index}: weight_map is {content!r:.80}; an object with the file of every weight is needed, each "
            "in the same folder"
        )
    return sorted(set(names))


def adapter_base(adapter: Path) -> str:
    """The base model that an adapter's config names, as something that can be loaded."""
    refuse_pipes(adapter)
    path = adapter / "adapter_config.json"
    name = read_json(path, ModelReferenceError).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelReferenceError(
            f"{path} names no base_model_name_or_path, so the base model of the adapter is unknown"
        )
    if Path(name).is_dir():
        check_model_folder(Path(name))
        return name
    if looks_like_hub_name(name):
        return name
    raise ModelReferenceError(
        f"{path}: base_model_name_or_path {name!r} does not exist; put the base model there, or write its new path "
        "into the file"
    )


_MODEL_KEY, _TOKENIZER_KEY = "policy.model_name", "policy.tokenizer.name"
Load = Callable[[Sequence[str]], "LoadedConfig[RunConfig]"]


def from_checkpoints(load: Load) -> Load:
    """`load`, with run and checkpoint folders that models are named by replaced by the folders of their weights."""

    def loaded(extra: Sequence[str]) -> LoadedConfig[RunConfig]:
        found = load(extra)
        weights = _weights(found)
        return load([*extra, *weights]) if weights else found

    return loaded


def _weights(loaded: LoadedConfig[RunConfig]) -> list[str]:
    from posttrain.config.tree import DEFAULT

    words, policy, values = [], loaded.config.policy, loaded.flat()
    own_tokenizer = (
        loaded.origins.get(_TOKENIZER_KEY, DEFAULT) != DEFAULT and policy.tokenizer.name != policy.model_name
    )
    for key in (_MODEL_KEY, "teacher.model_name", "value.model_name"):
        name = values.get(key)
        folder = Path(name or "").expanduser()
        has_model = any((folder / file).is_file() for file in ("config.json", "adapter_config.json"))
        if name is None or not folder.is_dir() or has_model:
            continue
        try:
            found = resolve_model(name)
        except InputError as error:
            raise InputError(f"{key} = {name}: {error}") from error
        if found.adapter is not None:
            raise InputError(
                f"{key} = {name}: the checkpoint holds LoRA adapters, and a whole model is needed. Merge them: "
                f"posttrain convert {name} --to FOLDER, then {key}=FOLDER"
            )
        words.append(f"{key}={found.model}")
        if key == _MODEL_KEY and not own_tokenizer:
            words.append(f"{_TOKENIZER_KEY}={found.tokenizer}")
    return words


# -- identity ----------------------------------------------------------------------------------------------------------


_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")


def model_fingerprint(model: ResolvedModel, say: Callable[[str], None] | None = None) -> str | None:
    """Hashes of the weights, of the base model under an adapter, and of the tokenizer; None for a model on the hub."""
    if model.files is None:
        return None
    folders = dict.fromkeys([model.files, Path(model.model), Path(model.tokenizer)])
    return folder_fingerprint(*(folder for folder in folders if folder.is_dir()), say=say)


def folder_fingerprint(*folders: Path, say: Callable[[str], None] | None = None) -> str:
    """Hash of the names and all bytes of a model's files, independent of the location.

    All bytes are hashed: training that changes a few layers may leave any sample of the bytes unchanged.
    """
    files = [
        file
        for folder in folders
        for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    ]
    return digest([[file.name, found] for file, found in zip(files, hash_files(files, say), strict=True)])
