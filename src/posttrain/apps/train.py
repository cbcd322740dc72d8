"""A run with the apps that take part in it: the commands `posttrain grpo`, `dpo`, … and `posttrain.grpo(…)` in Python.

The core trains. Apps add the prediction in the header, exports beside checkpoints, and advice when GPU memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from posttrain.run import RunExtensions


def _later(module: str, name: str) -> Callable[..., Any]:
    """Torch and the planner are imported when they are needed."""
    return lambda *arguments: getattr(import_module(f"posttrain.apps.{module}"), name)(*arguments)


WITH_APPS = RunExtensions(
    make_export=_later("export.periodic_export", "PeriodicExport"),
    plan=_later("plan.plan", "described"),
    advise=_later("plan.proposal", "advice"),
)
