"""`env.<name>.turns`: what is understood, what is refused, and what is said of it."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.config.base import ConfigError
from posttrain.environments.settings import read_settings, read_turns

DATA = ["data.train={dataset_name: ResponseDataset, data_path: rows.jsonl}", "data.default.env_name=calc"]


def load(*overrides: str) -> list[str]:
    return load_config("grpo", None, [*DATA, *overrides]).warnings


def test_several_turns_are_understood() -> None:
    loaded = load_config(
        "grpo", None, [*DATA, "env.calc.turns=calculator", "env.calc.type=math", "grpo.max_rollout_turns=5"]
    )
    assert loaded.config.grpo.max_rollout_turns == 5  # type: ignore[union-attr]
    settings = read_turns(loaded.config.env)["calc"]  # type: ignore[union-attr]
    assert settings.config.turns.endswith("calculator:Calculator")  # type: ignore[attr-defined]
    assert settings.path == "env.calc.turns"


def test_one_turn_is_too_few_for_an_environment_that_answers() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.max_rollout_turns = 1 .*set it to 2 or more"):
        load("env.calc.turns=calculator", "env.calc.type=math")


def test_a_name_that_is_nearly_one_of_ours_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        load("env.calc.turns=calculater", "grpo.max_rollout_turns=3")


def test_arguments_without_a_class_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set env\.calc\.turns"):
        load("env.calc.type=math", "env.calc.turns_kwargs={syntax: inline}")


def test_parts_of_a_judge_that_some_conversations_never_see_are_refused() -> None:
    several = "env.calc.rewards={a: {type: math}, b: {type: regex, pattern: x}}"
    turns = ["env.calc.turns=mine.py:Game", "grpo.max_rollout_turns=3"]
    with pytest.raises(ConfigError, match=r"gdpo needs the same reward parts .*without a judge"):
        load(*turns, several, "grpo.adv_estimator.name=gdpo")
    load(*turns, several)
    load(*turns, "grpo.adv_estimator.name=gdpo")


def test_many_turns_without_an_environment_that_takes_them_are_mentioned() -> None:
    said = [
        warning for warning in load("env.calc.type=math", "grpo.max_rollout_turns=9") if "max_rollout_turns" in warning
    ]
    assert len(said) == 1
    assert "changes nothing" in said[0]
    assert not [warning for warning in load("env.calc.type=math") if "max_rollout_turns" in warning]


def test_an_agent_alone_has_no_rewards_of_turns() -> None:
    agent = ["env.calc.agent=mine.py:solve", "grpo.max_rollout_turns=3", "grpo.turn_credit.enabled=true"]
    with pytest.raises(ConfigError, match=r"grpo\.turn_credit\.enabled = true: an agent \(env\.calc\.agent\) has no"):
        load(*agent)


def test_an_environment_that_gives_its_own_rewards_needs_no_judge() -> None:
    block = {"turns": "mine.py:Game", "num_workers": 3, "timeout_s": 2.5}
    assert read_settings({"game": block}, None) == {}
    assert list(read_settings({"game": {**block, "type": "math"}}, None)) == ["game"]
    settings = read_turns({"game": block, "math": None})
    assert list(settings) == ["game"]
    assert (settings["game"].num_workers, settings["game"].timeout_s) == (3, 2.5)
