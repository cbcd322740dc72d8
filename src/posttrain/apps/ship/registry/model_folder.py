"""Checks that a folder is a model that can be registered: a Hugging Face folder, a peft adapter or a checkpoint step_N.

Called before anything is written, so that every version can be loaded. Of weights only the headers are read. The files
of a checkpoint are compared with the checksums that it was saved with.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.ship.registry.artifacts import CHECKPOINT_FILES, CHECKPOINT_FOLDERS
from posttrain.checkpointing.integrity import CHECKSUMS, find_damage
from posttrain.errors import InputError, RegistryError
from posttrain.files.json_files import read_json

EXPECTED = "expected a Hugging Face folder, a peft adapter or a checkpoint step_N"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_ANY_BASE = "(any)"


def check_model_folder(folder: Path) -> None:
    """Raise RegistryError, naming the file and what is wrong with it, unless `folder` holds a complete model."""
    from posttrain.models.accepted_names import ModelReferenceError, resolve_model
    from posttrain.models.folder_checks import refuse_links_outside

    if not folder.is_dir():
        kind = "a file" if folder.exists() else "no such folder"
        raise RegistryError(f"{folder}: {kind}; {EXPECTED}")
    try:
        refuse_links_outside(folder)
    except InputError as error:
        raise RegistryError(str(error)) from error
    try:
        # The base model of an adapter is not part of the version and may be on another machine: it is not looked up.
        found = resolve_model(folder, base=_ANY_BASE)
        weights = found.files
        assert weights is not None, "only a name on the hub has no files"
        read_json(weights / ("config.json" if found.adapter is None else "adapter_config.json"), ModelReferenceError)
    except ModelReferenceError as error:
        problem = str(error).partition("; accepted:")[0]  # loading accepts more than registering
        raise RegistryError(f"{problem}; {EXPECTED}") from error
    if found.checkpoint is not None:
        _check_is_the_checkpoint(folder, found.checkpoint)
        _check_is_as_saved(found.checkpoint)
    if found.adapter is not None and not any((weights / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise RegistryError(f"{weights} has an adapter_config.json but no {_ADAPTER_WEIGHTS[0]}")
    for file in sorted(weights.glob("*.safetensors")):
        _check_header(file)


def _check_is_the_checkpoint(folder: Path, checkpoint: Path) -> None:
    """A run holds many checkpoints, and a part of a checkpoint lacks the rest: neither is one model."""
    if checkpoint.absolute() == folder.expanduser().absolute():
        return
    is_run = checkpoint.absolute().is_relative_to(folder.expanduser().absolute())
    what = (
        "the folder of a run, not one model; its newest complete checkpoint is" if is_run else "a part of a checkpoint:"
    )
    raise RegistryError(f"{folder} is {what} {checkpoint}. Register that: posttrain registry add NAME {checkpoint}")


def _check_is_as_saved(checkpoint: Path) -> None:
    is_ours = (checkpoint / "policy" / "model.json").exists()
    if not (checkpoint / CHECKSUMS).exists() and not is_ours:
        return  # written by another system, without checksums
    # Optimizer state is not registered, and not checked.
    if problems := find_damage(checkpoint, below=(*map("/".join, CHECKPOINT_FOLDERS), *CHECKPOINT_FILES)):
        raise RegistryError(
            f"{checkpoint} is not what was saved: {'; '.join(problems[:3])}. Register another checkpoint, or restore "
            "the files"
        )


def _check_header(file: Path) -> None:
    """Opening a file compares the end of every tensor, from the header, with the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise RegistryError(
            f"{file} is cut short or no safetensors file: it has {file.stat().st_size} bytes ({error}). "
            "Copy or convert it again"
        ) from error
