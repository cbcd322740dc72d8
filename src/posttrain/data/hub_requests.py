"""Asks the Hugging Face hub whether it has a model or a dataset, with one request and a short timeout.

The hub's client retries five times, with growing pauses. That is right for a download and wrong for a mistyped name or
a machine without a network, so names are checked here before a library gets them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Literal

from posttrain.errors import reason_of

# The hub's own timeout for metadata requests. Users with a slow connection to the hub set it.
PATIENCE_SETTING = "HF_HUB_ETAG_TIMEOUT"
PATIENCE_S = 10.0


@dataclass(frozen=True)
class HubAnswer:
    has_none: bool = False
    unreachable: str | None = None  # why there is no answer, as the end of a sentence about the hub


def ask_hub(kind: Literal["models", "datasets"], name: str) -> HubAnswer:
    from huggingface_hub import constants

    patience_s = float(constants.HF_HUB_ETAG_TIMEOUT) if PATIENCE_SETTING in os.environ else PATIENCE_S
    answers: queue.SimpleQueue[HubAnswer] = queue.SimpleQueue()
    # In a thread: the client's timeout applies to each part of a request, and not to the DNS lookup.
    threading.Thread(target=lambda: answers.put(_request(kind, name, patience_s)), daemon=True).start()
    try:
        return answers.get(timeout=patience_s)
    except queue.Empty:
        return _silent(patience_s)


def _silent(patience_s: float) -> HubAnswer:
    limit = f"{patience_s:g} s (the environment's {PATIENCE_SETTING} sets another limit)"
    return HubAnswer(unreachable=f"has not answered within {limit}")


def _request(kind: str, name: str, patience_s: float) -> HubAnswer:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    began = time.monotonic()
    try:
        url = f"{constants.ENDPOINT}/api/{kind}/{name}"
        response = get_session().get(url, headers=build_hf_headers(), timeout=patience_s)
    except Exception as error:  # of whichever HTTP library the hub's client is built on
        # The client's limit and the caller's end at about the same moment: either one means the same.
        if time.monotonic() - began >= patience_s:
            return _silent(patience_s)
        return HubAnswer(unreachable=f"cannot be reached: {reason_of(error)}")
    try:
        hf_raise_for_status(response)
    except HfHubHTTPError as error:
        # Gated repositories exist, and a busy hub may succeed on retry: loading handles both.
        return HubAnswer(isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError))
    return HubAnswer()
