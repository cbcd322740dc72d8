"""What makes two evaluations the same: model, problems, prompts, sampling and judge. Metrics are not part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.named_files import files_named_in
from posttrain.hashing import digest, hash_files
from posttrain.models.reference import ModelReference
from posttrain.types import Task

_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")


def prompts_hash(problems: Sequence[Task]) -> str:
    """Of what the model is asked, and in which order."""
    return digest([[dict(message) for message in problem.messages] for problem in problems])


def files_digest(values: Any) -> dict[str, str]:
    """SHA-256 of every file that settings name: a judge is the content of its file, not the name of it."""
    files = files_named_in(values)
    return {str(file): found for file, found in zip(files, hash_files(files), strict=True)}


def model_fingerprint(reference: ModelReference, say: Callable[[str], None] | None = None) -> str | None:
    """Of the weights, of the base model under an adapter, and of the tokenizer; None for a model on the hub.

    Evaluations, verdicts, the registry and the pipeline know a model by it: it is computed here and nowhere else.
    """
    if reference.files is None:
        return None
    folders = dict.fromkeys([reference.files, Path(reference.model), Path(reference.tokenizer)])
    return folder_fingerprint(*(folder for folder in folders if folder.is_dir()), say=say)


def folder_fingerprint(*folders: Path, say: Callable[[str], None] | None = None) -> str:
    """Of the names and of every byte of a model's files; a copy in another place gives the same one.

    Samples of the bytes would not do: a training that changes a few layers may leave all of them as they were.
    """
    files = [
        file
        for folder in folders
        for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    ]
    return digest([[file.name, found] for file, found in zip(files, hash_files(files, say), strict=True)])
