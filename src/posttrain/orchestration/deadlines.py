"""How long a rank may take for an operation, and a collective between ranks: afterwards it counts as hung."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import yaml

from posttrain.errors import InputError

NCCL_TIMEOUT_VARIABLE = "NCCL_TIMEOUT"  # timeout of collectives in seconds; read when the process group is created
RESERVE = "reserve"  # the operation whose deadline bounds the wait for nodes
DEADLINE_VARIABLE = "POSTTRAIN_WORKER_DEADLINE_S"
_SHORT_S = 900.0
OPERATIONS = yaml.safe_load(Path(__file__).with_name("operations.yaml").read_text("utf-8"))


def deadline_s(operation: str) -> float:
    chosen = os.environ.get(DEADLINE_VARIABLE)
    if not chosen:
        return float(OPERATIONS.get(operation, {}).get("deadline_s", _SHORT_S))
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
