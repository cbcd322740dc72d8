"""A run, or a checkpoint of one, as the model that another run starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.config import LoadedConfig
from posttrain.config.tree import DEFAULT
from posttrain.errors import InputError
from posttrain.models.accepted_names import resolve_model

MODEL, TOKENIZER = "policy.model_name", "policy.tokenizer.name"
Load = Callable[[Sequence[str]], LoadedConfig]


def from_checkpoints(load: Load) -> Load:
    """`load`, but that a folder of a run or checkpoint in policy.model_name becomes the folder of its weights."""

    def loaded(extra: Sequence[str]) -> LoadedConfig:
        found = load(extra)
        weights = _weights(found)
        return load([*extra, *weights]) if weights else found

    return loaded


def _weights(loaded: LoadedConfig) -> list[str]:
    policy = loaded.config.policy
    folder = Path(policy.model_name).expanduser()
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    try:
        found = resolve_model(policy.model_name)
    except InputError as error:
        raise InputError(f"{MODEL} = {policy.model_name}: {error}") from error
    if found.adapter is not None:
        raise InputError(
            f"{MODEL} = {policy.model_name}: the checkpoint holds LoRA adapters, and a run starts from a whole model. "
            f"Merge them: posttrain convert {policy.model_name} --to FOLDER, then {MODEL}=FOLDER"
        )
    own_tokenizer = loaded.origins.get(TOKENIZER, DEFAULT) != DEFAULT and policy.tokenizer.name != policy.model_name
    return [f"{MODEL}={found.model}", *([] if own_tokenizer else [f"{TOKENIZER}={found.tokenizer}"])]
