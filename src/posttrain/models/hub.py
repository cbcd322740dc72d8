"""Checks a model name against the Hugging Face hub, with one request and a short timeout.

The hub's client retries five times, with growing pauses. That is right for a download and wrong for a mistyped path, so
names are checked here before a library gets them. Nothing is downloaded, and torch is not imported.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import reason_of
from posttrain.models.config_file import why_unusable

# The hub's own timeout for metadata requests. Users with a slow connection to the hub set it.
PATIENCE_SETTING = "HF_HUB_ETAG_TIMEOUT"
PATIENCE_S = 10.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES_OF_A_MODEL = ("config.json", "tokenizer_config.json", "tokenizer.json")


def looks_like_hub_name(text: str) -> bool:
    """`owner/name`, unless a folder `owner` exists and the hub's cache has no such model: then it is a mistyped path."""
    return _HUB_NAME.fullmatch(text) is not None and (not Path(text).parent.exists() or _is_cached(text))


def why_unavailable(name: str, holding: str = "config.json and weights") -> str | None:
    """Why neither a folder nor the hub has the model or tokenizer `name`, and the remedies; None if one may have it.

    A folder whose config.json no model can be built from counts as one that does not have it.

    `holding` is what a folder would have to contain.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if Path(name).is_dir():
        return why_unusable(Path(name))
    folder = f"a folder with {holding}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return f"no folder {name!r}. Give {folder}, or a hub name such as Qwen/Qwen3-0.6B"
    if _is_cached(name):
        return None
    if "/" in name and Path(name).parent.exists():
        return (
            f"no folder {name!r}, though there is {str(Path(name).parent)!r}, so a path seems to be meant. Give {folder}; "
            f"if it is a hub name, fetch the model first: hf download {name}"
        )
    problem = _ask_hub(name, folder)
    return None if problem is None else f"no folder {name!r}, and {problem}"


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES_OF_A_MODEL)


def _ask_hub(name: str, folder: str) -> str | None:
    from huggingface_hub import constants

    hub = f"the hub ({constants.ENDPOINT})"
    elsewhere = f"Give {folder}, or fetch it where the hub can be reached (hf download {name}) and copy it here"
    if constants.HF_HUB_OFFLINE:
        return (
            f"it is not in the hub's cache {constants.HF_HUB_CACHE}, while HF_HUB_OFFLINE forbids to ask {hub}. "
            f"Give {folder}, or unset HF_HUB_OFFLINE"
        )
    patience_s = float(constants.HF_HUB_ETAG_TIMEOUT) if PATIENCE_SETTING in os.environ else PATIENCE_S
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    # In a thread: the client's timeout applies to each part of a request, and not to the DNS lookup.
    threading.Thread(target=lambda: answers.put(_request(name, patience_s)), daemon=True).start()
    try:
        answer = answers.get(timeout=patience_s)
    except queue.Empty:
        answer = _Answer(is_silent=True)
    if answer.is_silent:
        limit = f"{patience_s:g} s (the environment's {PATIENCE_SETTING} sets another limit)"
        return f"{hub} has not answered within {limit}. {elsewhere}"
    if answer.unreachable is not None:
        return f"{hub} cannot be reached: {answer.unreachable}. {elsewhere}"
    if answer.has_none:
        return (
            f"{hub} has no such model, or hides it from you. Give {folder}, or a hub name such as Qwen/Qwen3-0.6B; for a "
            "private one: hf auth login"
        )
    return None


@dataclass(frozen=True)
class _Answer:
    has_none: bool = False
    is_silent: bool = False  # past the time limit
    unreachable: str | None = None  # why


def _request(name: str, patience_s: float) -> _Answer:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    began = time.monotonic()
    try:
        url = f"{constants.ENDPOINT}/api/models/{name}"
        response = get_session().get(url, headers=build_hf_headers(), timeout=patience_s)
    except Exception as error:  # of whichever HTTP library the hub's client is built on
        # The client's limit and the caller's end at about the same moment: either one means the same.
        is_silent = time.monotonic() - began >= patience_s
        return _Answer(is_silent=True) if is_silent else _Answer(unreachable=reason_of(error))
    try:
        hf_raise_for_status(response)
    except HfHubHTTPError as error:
        # A gated model exists, and a busy hub is worth a retry: loading the model deals with both.
        return _Answer(isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError))
    return _Answer()
