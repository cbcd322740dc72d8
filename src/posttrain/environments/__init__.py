"""Environments score completions. Untrusted or fragile code runs in worker processes that can be killed.

The names below load on first use: worker processes and `check_environments` must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.environments.router import ScoringRouter, build_environments
    from posttrain.environments.worker_process import check_environments

_HOME = {
    "ScoringRouter": "router",
    "build_environments": "router",
    "check_environments": "worker_process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
