"""Short names of settings on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import load_config
from posttrain.config.base import ConfigError
from posttrain.config.command_line import MANY_EPOCHS, aliases_of, expand_aliases
from posttrain.config.runs import ALL_KINDS, KINDS, RUN_CONFIGS, Kind
from posttrain.config.schema import find, schema_of


@pytest.mark.parametrize("kind", KINDS)
def test_every_short_name_stands_for_a_setting(kind: str) -> None:
    for key in aliases_of(kind).values():
        assert find(schema_of(kind), tuple(key.split("."))) is not None, key


def test_short_names_set_what_the_full_ones_set() -> None:
    short = load_config("grpo", None, ["lr=3e-6", "lora=16", "steps=7", "kl=0.05", "policy.learning_rate=2e-6"]).config
    assert short.policy.optimizer.kwargs["lr"] == 2e-6
    assert (short.policy.dtensor_cfg.lora_cfg.enabled, short.policy.dtensor_cfg.lora_cfg.dim) == (True, 16)
    assert (short.grpo.max_num_steps, short.loss_fn.reference_policy_kl_penalty) == (7, 0.05)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("lora=true", ["policy.dtensor_cfg.lora_cfg.enabled=true"]),
        ("lora=0", ["policy.dtensor_cfg.lora_cfg.enabled=false"]),
        ("++steps=3", ["dpo.max_num_epochs=1000000", "dpo.max_num_steps=3"]),
        ("data=it's.jsonl", ["data.train={dataset_name: PreferenceDataset, data_path: 'it''s.jsonl'}"]),
        ("data={train: {data_path: x}}", ["data={train: {data_path: x}}"]),
        ("policy.precision=float32", ["policy.precision=float32"]),
        ("~lr", ["~lr"]),
        ("reward=x.py:f", ["reward=x.py:f"]),
    ],
)
def test_expansion(text: str, full: list[str]) -> None:
    assert expand_aliases("dpo", [text]) == full


def test_a_reward_is_an_environment_for_every_row() -> None:
    own = load_config("grpo", None, ["reward=rewards.py:close"]).config
    assert (own.env["reward"].function, own.data.default.env_name) == ("rewards.py:close", "reward")
    assert load_config("grpo", None, ["reward=math"]).config.env["reward"].type == "math"


def test_a_reward_that_the_data_does_not_use_is_refused() -> None:
    words = [
        "reward=rewards.py:close",
        "data.train={dataset_name: ResponseDataset, data_path: x.jsonl, env_name: math}",
    ]
    with pytest.raises(ConfigError, match=r"would judge nothing; set data\.train\.env_name=reward"):
        load_config("grpo", None, words)
    loaded = load_config("grpo", None, [*words, "data.train.env_name=reward"])
    assert [entry.env_name for entry in loaded.config.data.train_sets()] == ["reward"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_alone_are_the_length_of_a_run(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{kind}: {{max_num_epochs: 2}}\n")

    def lengths(*overrides: str) -> tuple[int, int]:
        section = getattr(load_config(kind, file, overrides).config, kind)
        return section.max_num_steps, section.max_num_epochs

    assert lengths("steps=200") == lengths("max_steps=200") == (200, MANY_EPOCHS)
    assert lengths("epochs=3", "steps=200") == (200, 3)
    assert lengths("steps=200", f"{kind}.max_num_epochs=3") == (200, 3)
    assert lengths(f"{kind}.max_num_steps=200") == (200, 2), "the full name keeps NeMo RL's meaning"


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sections_are_not_taken_for_misspelt_short_names(kind: Kind) -> None:
    for section in RUN_CONFIGS[kind].model_fields:
        assert expand_aliases(kind, [f"{section}={{}}"]) == [f"{section}={{}}"]


def test_a_misspelt_config_file_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("grpo:\n")
    with pytest.raises(ConfigError, match=r"no such config file \(did you mean '.*grpo\.yaml'"):
        load_config("grpo", tmp_path / "grppo.yaml")
