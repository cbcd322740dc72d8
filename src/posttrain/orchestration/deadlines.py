"""How long a rank may take for an operation, and a collective between ranks: afterwards it counts as hung."""

from __future__ import annotations

import os
from datetime import timedelta

from posttrain.errors import InputError

NCCL_TIMEOUT_VARIABLE = "NCCL_TIMEOUT"  # timeout of collectives in seconds; read when the process group is created
RESERVE = "reserve"  # the operation whose deadline bounds the wait for nodes
DEADLINE_VARIABLE = "POSTTRAIN_WORKER_DEADLINE_S"
_SHORT_S, _FILES_S, _COMPUTE_S = 900.0, 3600.0, 4 * 3600.0
# Far above normal operation times: a deadline ends a hang, not a slow step.
_DEADLINES_S = {
    RESERVE: 600.0,  # nodes that are being started join within minutes
    "build": _FILES_S,
    "save": _FILES_S,
    "begin_save": _FILES_S,
    "prepare_save": _FILES_S,
    "load": _FILES_S,
    "send_weights": _FILES_S,
    "receive_weights": _FILES_S,
    "reference_fingerprint": _FILES_S,
    "update": _COMPUTE_S,
    "evaluate": _COMPUTE_S,
    "logprobs": _COMPUTE_S,
    "reference_logprobs": _COMPUTE_S,
    "publish": _FILES_S,
    "generate": _COMPUTE_S,
    "score": _COMPUTE_S,
    "sample_round": _COMPUTE_S,
}


def deadline_s(operation: str) -> float:
    chosen = os.environ.get(DEADLINE_VARIABLE)
    if not chosen:
        return _DEADLINES_S.get(operation, _SHORT_S)
    try:
        seconds = float(chosen)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InputError(f"{DEADLINE_VARIABLE} is {chosen!r}; accepted: a number of seconds above 0")
    return seconds


def collective_timeout() -> timedelta | None:
    """None: torch's default, 10 minutes with NCCL and 30 with gloo."""
    chosen = os.environ.get(NCCL_TIMEOUT_VARIABLE)
    if not chosen:
        return None
    if not chosen.isdecimal() or int(chosen) == 0:
        raise InputError(f"{NCCL_TIMEOUT_VARIABLE} is {chosen!r}; accepted: a number of seconds above 0")
    return timedelta(seconds=int(chosen))
