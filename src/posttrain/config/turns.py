"""`env.<name>.turns`: environments that take turns with the model. `max_rollout_turns` bounds their conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import ClassVar, Literal

from pydantic import Field

from posttrain.config.base import FreeMap
from posttrain.config.data import EnvironmentConfig
from posttrain.config.grpo import GrpoRunConfig
from posttrain.config.rewards import RewardConfig

BUILT_IN = {
    "calculator": "posttrain.environments.turns.calculator:Calculator",
    "search": "posttrain.environments.turns.search:Search",
}


class TurnsConfig(RewardConfig):
    """The class behind `turns`, as it is sent to its worker processes. Not a type of reward: no block names it."""

    default_num_workers: ClassVar[int] = 4

    type: Literal["turns"] = Field(default="turns", description="Tells the workers what they are.")
    turns: str = Field(
        description="A built-in name, `file.py:Class`, `package.module:Class` or `package.module.Class`."
    )
    kwargs: FreeMap = Field(default_factory=dict, description="Arguments of the class.")


def check_turns(config: GrpoRunConfig) -> Iterator[str]:
    limit = config.grpo.max_rollout_turns
    for name in _used(config):
        if limit < 2:
            yield (
                f"env.{name}.turns takes turns with the model, but grpo.max_rollout_turns = {limit} ends a conversation "
                "before the model can read what the environment returns: set it to 2 or more, or remove the turns"
            )
        if config.grpo.adv_estimator.name == "gdpo" and config.env[name].reward_configs(name):
            yield (
                f"grpo.adv_estimator.name = gdpo needs the same reward parts of every rollout, but a conversation of env.{name} "
                "that a limit ends never comes to its judge, and has none of the judge's: use grpo, or have the class in "
                f"env.{name}.turns give all rewards as named parts, without a judge"
            )
    yield from check_turn_classes(config.env)


def check_turn_classes(environments: Mapping[str, EnvironmentConfig]) -> Iterator[str]:
    for name, environment in environments.items():
        if (
            environment.turns is not None
            and environment.turns not in BUILT_IN
            and not {":", "."} & set(environment.turns)
        ):
            near = get_close_matches(environment.turns, BUILT_IN, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(BUILT_IN)}"
            yield (
                f"env.{name}.turns = {environment.turns!r} is not an environment that posttrain has ({hint}); one of your "
                "own is named 'file.py:Class' or 'package.module:Class'"
            )
        if environment.turns_kwargs and environment.turns is None:
            yield f"env.{name}.turns_kwargs are arguments of a class that is not named: set env.{name}.turns"


def unused_turns(config: GrpoRunConfig) -> Iterator[str]:
    if config.grpo.max_rollout_turns > 1 and not _used(config):
        yield (
            f"grpo.max_rollout_turns: {config.grpo.max_rollout_turns} changes nothing, because no environment in use has "
            "`turns`: every rollout is a single turn"
        )


def _used(config: GrpoRunConfig) -> list[str]:
    named = {entry.env_name for entry in [*config.data.train_sets(), *config.data.validation_sets()]}
    return [name for name, block in config.env.items() if block.turns is not None and name in named]
