"""A run with the apps that take part in it: the commands `posttrain grpo`, `dpo`, … and `posttrain.grpo(…)` in Python.

The core trains. Apps add the prediction in the header, exports beside checkpoints, and advice when GPU memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.run import RunExtensions

if TYPE_CHECKING:
    from posttrain.apps.export.periodic_export import PeriodicExport
    from posttrain.config import RunConfig
    from posttrain.errors import OutOfGpuMemoryError


# Torch and the planner are imported when they are needed.
def _export(warn: Callable[[str], None], merge_lora: bool) -> PeriodicExport:
    from posttrain.apps.export.periodic_export import PeriodicExport

    return PeriodicExport(warn, merge_lora)


def _planned(config: RunConfig, device_name: str, max_steps: int) -> str:
    from posttrain.apps.plan.plan import described

    return described(config, device_name, max_steps)


def _advice(config: RunConfig, error: OutOfGpuMemoryError, folder: Path) -> str:
    from posttrain.apps.plan.proposal import advice

    return advice(config, error, folder)


WITH_APPS = RunExtensions(_export, _planned, _advice)
