"""Checks the `env:` section of a config before a model is loaded. Does not import torch.

Each reward is started once, in a worker, as it will be for the run. A reward function that hangs, exits or crashes
while it is imported is reported like one that raises, and does not affect this process.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from posttrain.config.rewards import PythonRewardConfig
from posttrain.environments.reward_types import WORKER_SCORERS
from posttrain.environments.settings import RewardSettings, read_settings, read_turns
from posttrain.environments.worker_process import START_LIMIT_S, WorkerProcess, wait_for
from posttrain.errors import InputError


def check_environments(mapping: Any, base_folder: Path | None = None) -> None:
    """Raise `InputError` if a block under `env:` is wrong, or what it names cannot be used."""
    for environment in read_settings(mapping, base_folder).values():
        for settings in environment.rewards.values():
            # In-process rewards are checked when they are built; workers cannot start them.
            if settings.config.type in WORKER_SCORERS:
                _check(settings)
    for settings in read_turns(mapping, base_folder).values():
        _check(settings)


def _check(settings: RewardSettings) -> None:
    reason = _reason_not_to_start(settings)
    if reason is not None and isinstance(settings.config, PythonRewardConfig):
        raise InputError(f"{settings.path}.function is {settings.config.function!r}: {reason}")
    if reason is not None:
        raise InputError(f"{settings.path} cannot start: {reason}")


def _reason_not_to_start(settings: RewardSettings) -> str | None:
    worker = WorkerProcess(settings)
    try:
        while not worker.ready:
            left_s = worker.started_at + START_LIMIT_S - time.monotonic()
            if left_s <= 0:
                return f"it has not finished importing after {START_LIMIT_S:g} s\n{worker.stack() or ''}".rstrip()
            wait_for([worker], min(left_s, 0.5))
            worker.exchange()
            if worker.failed_start is not None:
                return str(worker.failed_start["error"])
            if worker.gone and not worker.ready:
                reason, last_words = worker.death()
                return f"{reason} while importing it\n{last_words or ''}".rstrip()
        return None
    finally:
        worker.kill()
