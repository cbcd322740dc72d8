"""The identity of a model: a hash of its files. Evaluations, verdicts, the registry and the pipeline compare models
by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posttrain.files.digests import digest, hash_files
from posttrain.models.accepted_names import ResolvedModel

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
