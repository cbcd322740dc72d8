"""The `turns` of the blocks under `env:`, as their worker processes are told of them. No torch, no processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config.data import EnvironmentConfig
from posttrain.config.turns import BUILT_IN, TurnsConfig
from posttrain.environments.settings import RewardSettings


def read_turns(environments: Mapping[str, Any] | None, base_folder: Path | None = None) -> dict[str, RewardSettings]:
    """For each environment with `turns`, its settings. Blocks may be mappings, pydantic models or nothing at all."""
    folder = Path.cwd() if base_folder is None else Path(base_folder).expanduser().absolute()
    settings = {}
    for name, block in (environments or {}).items():
        environment = block if isinstance(block, EnvironmentConfig) else EnvironmentConfig.model_validate(block or {})
        if environment.turns is None:
            continue
        config = TurnsConfig(turns=BUILT_IN.get(environment.turns, environment.turns), kwargs=environment.turns_kwargs)
        settings[str(name)] = RewardSettings(
            path=f"env.{name}.turns",
            config=config,
            num_workers=environment.num_workers,
            timeout_s=environment.timeout_s or config.default_timeout_s,
            base_folder=folder,
        )
    return settings
