"""Overrides on the command line: Hydra's grammar over every key of the schema."""

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.config.command_line import parse_override


def grpo(*overrides: str):
    return load_config("grpo", None, list(overrides))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-8", 1e-8),
        ("a.b=5.0e-6", 5e-6),
        ("a.b=true", True),
        ("a.b=True", True),
        ("a.b=null", None),
        ("a.b=", ""),
        ("a.b='x y'", "x y"),
        ('a.b="1"', "1"),
        ("a.b=[1,2]", [1, 2]),
        ("a.b=[]", []),
        ("a.b={c: 1, d: x}", {"c": 1, "d": "x"}),
        ("a.b={c:1,d:[2,3]}", {"c": 1, "d": [2, 3]}),
        ("a.b={}", {}),
        ("a.b=x=y", "x=y"),
        ("a.b=s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl"),
        ("a.b=00:03:45:00", "00:03:45:00"),
        ("a.b=1:30:00:00", "1:30:00:00"),
        ("a.b=2024-01-01", "2024-01-01"),
        ("a.b=${mul:2,3}", "${mul:2,3}"),
    ],
)
def test_values_are_read_as_yaml(text: str, value: object) -> None:
    parsed = parse_override(text)
    assert parsed.path == ("a", "b")
    assert parsed.value == value
    assert type(parsed.value) is type(value)


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_the_three_ways_to_set_mean_the_same(sign: str) -> None:
    loaded = grpo(f"{sign}grpo.max_num_steps=7", f"{sign}policy.device=cpu")
    assert loaded.config.grpo.max_num_steps == 7
    assert loaded.config.policy.device == "cpu"
    assert loaded.origins["grpo.max_num_steps"] == "command line"
    assert loaded.origins["grpo.max_num_epochs"] == "default"


def test_later_overrides_win() -> None:
    assert grpo("grpo.seed=1", "grpo.seed=2").config.grpo.seed == 2


def test_keys_of_free_maps_need_not_exist() -> None:
    config = grpo(
        "+policy.optimizer.kwargs.fused=true",
        "policy.hf_config_overrides.rope_scaling.factor=2.0",
        "policy.tokenizer.chat_template_kwargs.enable_thinking=false",
        "env.mine.function=rewards.py:score",
        "env.mine.timeout_s=3",
    ).config
    assert config.policy.optimizer.kwargs["fused"] is True
    assert config.policy.optimizer.kwargs["lr"] == 5e-6
    assert config.policy.hf_config_overrides == {"rope_scaling": {"factor": 2.0}}
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert config.env["mine"].function == "rewards.py:score"
    assert config.env["mine"].timeout_s == 3.0


def test_a_map_merges_into_a_map_and_a_list_replaces_a_list() -> None:
    config = grpo("policy.optimizer.kwargs={lr: 1e-4}", "policy.optimizer.kwargs.betas=[0.5,0.6]").config
    assert config.policy.optimizer.kwargs == {"lr": 1e-4, "weight_decay": 0.01, "betas": [0.5, 0.6], "eps": 1e-8}


def test_removing_a_key_leaves_what_its_absence_means() -> None:
    config = grpo("~policy.scheduler", "~policy.optimizer.kwargs.eps", "~loss_fn.kl_input_clamp_value").config
    assert config.policy.scheduler is None
    assert "eps" not in config.policy.optimizer.kwargs
    assert config.loss_fn.kl_input_clamp_value == 20.0
    assert "eps" not in grpo("~policy.optimizer.kwargs.eps=1e-8").config.policy.optimizer.kwargs


@pytest.mark.parametrize("text", ["grpo.seed", "=3", "grpo..seed=3", "-x", "a b=c", "~", "+"])
def test_what_is_not_an_override_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("~policy.optimizer.kwargs.nothing", r"~policy\.optimizer\.kwargs\.nothing"),
        ("~policy.optimizer.kwargs.eps=1", r"does not apply.*policy\.optimizer\.kwargs\.eps.*1e-08"),
        ("policy.model_name=[x", r"policy\.model_name=\[x"),
        ("grpo.seed.x=3", r"`grpo\.seed` is 42"),
        ("grpo.max_num_steps=true", r"`grpo\.max_num_steps` = True"),
        ("grpo.max_num_steps=1.5", r"`grpo\.max_num_steps` = 1\.5"),
        ("policy.optimizer.name=torch.optim.SGD", r"policy\.optimizer\.kwargs\.lr is not set"),
        ("stps=3", r"unknown key `stps`; did you mean `steps`\?"),
        ("lora=large", "rank of the adapters"),
        ("configs/grpo.yaml", r"--config configs/grpo\.yaml"),
    ],
)
def test_what_cannot_be_applied_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grpo(text)


def test_entries_of_a_list_can_be_named() -> None:
    config = grpo(
        "data.train=[{dataset_name: gsm8k}, {dataset_name: DeepScaler}]", "data.train[1].data_path=x.jsonl"
    ).config
    assert [entry.data_path for entry in config.data.train_sets()] == [None, "x.jsonl"]
    with pytest.raises(ConfigError, match=r"data\.train` is a list of 1"):
        grpo("data.train=[{dataset_name: gsm8k}]", "data.train.data_path=x")


@pytest.mark.parametrize("order", [1, -1])
def test_another_optimizer_does_not_inherit_the_arguments_of_the_default(order: int) -> None:
    overrides = ["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.lr=0.1"][::order]
    config = grpo(*overrides).config
    assert config.policy.optimizer.kwargs == {"lr": 0.1}


def test_a_whole_float_is_a_count() -> None:
    assert grpo("grpo.max_num_steps=1e3").config.grpo.max_num_steps == 1000


def test_a_section_that_is_removed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"policy\.generation"):
        load_config("grpo", None, ["~policy.generation"])
