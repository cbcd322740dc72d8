"""The learning-rate schedule of `policy.scheduler`, by dotted name: torch's or the user's, or several in a row."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping

SchedulerSpec = JsonMapping | Sequence[JsonMapping] | None  # `policy.scheduler`


def resolve(dotted: str, field: str) -> Any:
    """The object that a dotted name such as `torch.optim.AdamW` names."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{field}: cannot find {dotted!r} ({error}); give a dotted path such as torch.optim.AdamW"
        ) from error


def build_scheduler(optimizer: Optimizer, spec: SchedulerSpec) -> LRScheduler | None:
    """None, one {name, kwargs}, or a list of them ending with {milestones: […]}, which run one after another."""
    if not spec:
        return None
    field = "policy.scheduler"
    if isinstance(spec, Mapping):
        if spec["name"].endswith("ReduceLROnPlateau"):
            raise InputError(
                f"{field}: {spec['name']} waits for a metric; choose a schedule that depends on the step alone"
            )
        try:
            return resolve(spec["name"], field)(optimizer, **dict(spec.get("kwargs") or {}))
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"{field}: the kwargs do not fit {spec['name']}: {error}") from error
    parts = [item for item in spec if "name" in item]
    milestones = [m for item in spec if "milestones" in item for m in item["milestones"]]
    schedulers = [build_scheduler(optimizer, part) for part in parts]
    if len(schedulers) == 1:
        return schedulers[0]
    if len(milestones) != len(schedulers) - 1:
        raise InputError(
            f"{field}: {len(schedulers)} schedulers need {len(schedulers) - 1} milestones, got {milestones}"
        )
    return SequentialLR(optimizer, [s for s in schedulers if s is not None], milestones=milestones)
