"""References between keys, and the four functions."""

import pytest

from posttrain.config import ConfigError, load_config


def grpo(*overrides: str):
    return load_config("grpo", None, list(overrides)).config


def test_defaults_follow_the_keys_they_refer_to() -> None:
    config = grpo(
        "policy.model_name=some/model",
        "policy.max_total_sequence_length=1024",
        "policy.train_micro_batch_size=8",
        "policy.generation.temperature=0.7",
        "grpo.normalize_rewards=false",
        "grpo.seed=5",
        "policy.precision=float32",
    )
    assert config.policy.tokenizer.name == "some/model"
    assert config.policy.generation.max_new_tokens == 1024
    assert config.data.max_input_seq_length == 1024
    assert config.policy.logprob_batch_size == 8
    assert config.policy.sequence_packing.train_mb_tokens == 8192
    assert config.policy.generation.val_temperature == 0.7
    assert config.grpo.adv_estimator.normalize_rewards is False
    assert config.data.train_sets()[0].seed == 5


def test_a_value_that_is_set_no_longer_follows() -> None:
    config = grpo("policy.model_name=some/model", "policy.tokenizer.name=other/tokenizer")
    assert config.policy.tokenizer.name == "other/tokenizer"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${add:1,2}", 3),
        ("${mul:3,4}", 12),
        ("${div:512,4}", 128),
        ("${max:3,7}", 7),
        ("${mul:2,${grpo.seed}}", 84),
        ("${div:${mul:${grpo.num_prompts_per_step},3},2}", 48),
        ("${grpo.num_generations_per_prompt}", 16),
        ("${.val_batch_size}", 256),
        ("${..loss_fn.kl_input_clamp_value}", 20),
    ],
)
def test_functions_and_references(expression: str, value: int) -> None:
    assert grpo(f"grpo.max_num_steps={expression}").grpo.max_num_steps == value


def test_exact_results_stay_integers_and_others_become_floats() -> None:
    kwargs = grpo(
        "policy.optimizer.kwargs.a=${div:6,3}",
        "policy.optimizer.kwargs.b=${div:7,2}",
        "policy.optimizer.kwargs.c=${mul:2,0.5}",
    ).policy.optimizer.kwargs
    assert (kwargs["a"], type(kwargs["a"])) == (2, int)
    assert (kwargs["b"], type(kwargs["b"])) == (3.5, float)
    assert (kwargs["c"], type(kwargs["c"])) == (1.0, float)


def test_a_fraction_does_not_fit_a_count() -> None:
    with pytest.raises(ConfigError, match=r"`grpo\.max_num_steps` = 3\.5: must be a valid integer"):
        grpo("grpo.max_num_steps=${div:7,2}")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("${polcy.model_name}", "not found"),
        ("${mul:a,2}", "two numbers"),
        ("${div:1,0}", "zero"),
        ("${nope:1}", "nope"),
    ],
)
def test_what_cannot_be_resolved_names_the_key(expression: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"command line: `grpo\.max_num_steps` = .*cannot be resolved") as caught:
        grpo(f"grpo.max_num_steps={expression}")
    assert reason in str(caught.value)
