"""The blocks under `env:` as checked, typed values. Independent of processes; a wrong value is an `InputError`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from posttrain.config.base import FreeMap, explain_errors
from posttrain.config.data import BUILT_IN_TURNS, REMOTE_TURNS, EnvironmentConfig
from posttrain.config.rewards import AgentConfig, RemoteTurnsConfig, RewardConfig, TurnsConfig
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import name_credentials


@dataclass(frozen=True)
class RewardSettings:
    """One reward: its section of the config, and settings from its environment block."""

    path: str  # config path, for messages: `env.math`, `env.gsm8k.rewards.format`
    config: RewardConfig
    num_workers: int | None  # None: the default of its type
    timeout_s: float  # of wall-clock time, for one completion
    base_folder: Path  # files that the config names are relative to it

    def worker_setup(self) -> JsonObject:
        """What a worker needs to know to build its scorer, as plain JSON values."""
        plain = self.config.model_dump(mode="json", by_alias=True)
        # The limit that the pool enforces: a scorer with a message of its own has to return before it.
        return {**plain, "timeout_s": self.timeout_s, "base_folder": str(self.base_folder)}


@dataclass(frozen=True)
class EnvironmentSettings:
    """The rewards of one environment: a single one, or a weighted sum of several by name."""

    name: str
    rewards: Mapping[str, RewardSettings]  # a single reward is under the empty name

    @property
    def is_single(self) -> bool:
        return set(self.rewards) == {""}


Block = EnvironmentConfig | Mapping[str, object] | None
Blocks = Mapping[str, Block] | None


def read_settings(blocks: Blocks, base_folder: Path | None) -> dict[str, EnvironmentSettings]:
    """The rewards of each environment under `env:`. Sections of a config are taken as they are, maps are validated.

    An environment that takes turns with the model, or an agent, may give all rewards itself: then it is not in the
    result.
    """
    folder = _absolute(base_folder)
    found = {name: _rewards_of(name, block, folder) for name, block in _configs(blocks)}
    return {name: settings for name, settings in found.items() if settings.rewards}


def read_turns(blocks: Blocks, base_folder: Path | None = None) -> dict[str, RewardSettings]:
    """For each environment with `turns`, the settings of the class behind it."""
    found = {}
    for name, block in _configs(blocks):
        if block.turns is not None:
            kind = RemoteTurnsConfig if block.turns in REMOTE_TURNS else TurnsConfig
            own: FreeMap = {"python": block.python} if block.python is not None else {}
            given = {**block.turns_kwargs, **own, **({"env": _variables(name, block)} if block.env else {})}
            config = kind(turns=BUILT_IN_TURNS.get(block.turns, block.turns), kwargs=given)
            found[name] = _in_workers(block, f"env.{name}.turns", config, base_folder)
    return found


def read_agents(blocks: Blocks, base_folder: Path | None = None) -> dict[str, RewardSettings]:
    """For each environment with an `agent`, its settings."""
    found = {}
    for name, block in _configs(blocks):
        if block.agent is not None:
            own = {"python": block.python} if block.python is not None else {}
            given = {**block.agent_kwargs, **own}
            variables = _variables(name, block)
            config = AgentConfig(agent=block.agent, kwargs=given, env=variables, turn_timeout_s=block.turn_timeout_s)
            found[name] = _in_workers(block, f"env.{name}.agent", config, base_folder)
    return found


def _variables(name: str, block: EnvironmentConfig) -> dict[str, str | None]:
    for key, value in block.env.items():
        if value is None and key not in os.environ:
            raise InputError(f"env.{name}.env.{key} is null, which passes on a variable of the run, and it has none")
    return block.env


def _in_workers(block: EnvironmentConfig, path: str, config: RewardConfig, base_folder: Path | None) -> RewardSettings:
    timeout_s = block.timeout_s or config.default_timeout_s
    return RewardSettings(path, config, block.num_workers, timeout_s, _absolute(base_folder))


def _configs(blocks: Blocks) -> Iterator[tuple[str, EnvironmentConfig]]:
    if blocks is not None and not isinstance(blocks, Mapping):
        raise InputError(f"env is {blocks!r}: a mapping of settings is needed")
    for name, block in (blocks or {}).items():
        yield str(name), environment_config(name, block)


def environment_config(name: str, block: Block) -> EnvironmentConfig:
    path = f"env.{name}"
    if isinstance(block, EnvironmentConfig):
        return block
    if block is not None and not isinstance(block, Mapping):
        raise InputError(f"{path} is {block!r}: a mapping of settings is needed")
    name_credentials(dict(block or {}))
    try:
        return EnvironmentConfig.model_validate({k: value for k, value in (block or {}).items() if value is not None})
    except ValidationError as error:
        raise InputError("\n".join(explain_errors(error, path))) from error


def _absolute(base_folder: Path | None) -> Path:
    return Path.cwd() if base_folder is None else Path(base_folder).expanduser().absolute()


def _rewards_of(name: str, config: EnvironmentConfig, base_folder: Path) -> EnvironmentSettings:
    path = f"env.{name}"
    try:
        rewards = config.reward_configs(name)
    except ValidationError as error:  # keys of a block without a type, under a name that decides none
        raise InputError("\n".join(explain_errors(error, path))) from error
    if not rewards and config.turns is None and config.agent is None:
        raise InputError(
            f"{path} does not say how to judge a completion: set {path}.type to a type of reward (`posttrain rewards "
            f"list` shows them), {path}.function to a Python function ('rewards.py:my_reward'), or {path}.rewards to "
            "several"
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
