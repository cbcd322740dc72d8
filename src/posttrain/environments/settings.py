"""The blocks under `env:` as checked, typed values. Knows nothing of processes; a wrong value is a `RewardConfigError`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.config.data import EnvironmentConfig
from posttrain.config.rewards import RewardConfig
from posttrain.errors import InputError


class RewardConfigError(InputError):
    """A block under `env:` that cannot work, or a task that names an environment which is not there."""


@dataclass(frozen=True)
class RewardSettings:
    """One reward: its section of the config, and what its surroundings add to it."""

    path: str  # where it stands, for messages: `env.math`, `env.gsm8k.rewards.format`
    config: RewardConfig
    num_workers: int | None  # None: the default of its type
    timeout_s: float  # of wall-clock time, for one completion
    base_folder: Path  # files that the config names are relative to it

    def worker_setup(self) -> dict[str, Any]:
        """What a worker needs to know to build its scorer, as plain JSON values."""
        plain = self.config.model_dump(mode="json", by_alias=True)
        # The limit that the pool keeps: a scorer that wants to say more than "timeout" has to be done before.
        return {**plain, "timeout_s": self.timeout_s, "base_folder": str(self.base_folder)}


@dataclass(frozen=True)
class EnvironmentSettings:
    """What is scored for one environment: a single reward, or several by name that are added up with their weights."""

    name: str
    rewards: Mapping[str, RewardSettings]  # a single reward is under the empty name

    @property
    def is_single(self) -> bool:
        return set(self.rewards) == {""}


def read_settings(mapping: Any, base_folder: Path | None) -> dict[str, EnvironmentSettings]:
    """The environments of a config's `env:`, by name. Values may be mappings, pydantic models or nothing at all."""
    folder = Path.cwd() if base_folder is None else Path(base_folder).expanduser().absolute()
    blocks = {str(name): _read_block(str(name), block, folder) for name, block in _plain("env", mapping).items()}
    # One that takes turns with the model may give all rewards itself; then there is nothing for a judge to do.
    return {name: settings for name, settings in blocks.items() if settings.rewards}


def _plain(path: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise RewardConfigError(f"{path} is {value!r}: a mapping of settings is needed")
    return {str(key): inner for key, inner in value.items()}


def _read_block(name: str, block: Any, base_folder: Path) -> EnvironmentSettings:
    path = f"env.{name}"
    values = {key: value for key, value in _plain(path, block).items() if value is not None}
    try:
        config = EnvironmentConfig.model_validate(values)
        rewards = config.reward_configs(name)
    except ValidationError as error:
        raise RewardConfigError(explain(path, error)) from error
    if not rewards and config.turns is None:
        raise RewardConfigError(
            f"{path} does not say how to judge a completion: set {path}.type to a type of reward (`posttrain rewards list` "
            f"shows them), {path}.function to a Python function ('rewards.py:my_reward'), or {path}.rewards to several"
        )
    settings = {}
    for part, reward in rewards.items():
        settings[part] = RewardSettings(
            path=f"{path}.rewards.{part}" if part else path,
            config=reward,
            num_workers=reward.num_workers or config.num_workers,
            timeout_s=float(reward.timeout_s or config.timeout_s or reward.default_timeout_s),
            base_folder=base_folder,
        )
    return EnvironmentSettings(name, settings)


def explain(path: str, error: ValidationError) -> str:
    """What pydantic found, one line for each key, in the words of the config's own errors."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        key = ".".join([path, *map(str, problem["loc"])])
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        value = problem["input"]
        if problem["type"] == "missing":
            line = f"{key} is missing"
        elif isinstance(value, Mapping):
            line = f"{key}: {message}"
        else:
            line = f"{key} is {value!r:.200}: {message}"
        lines.setdefault(key, line)
    return "\n".join(lines.values())
