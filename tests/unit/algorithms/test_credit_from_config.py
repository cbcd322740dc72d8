"""Every setting of credit, selection and loss arrives where it works. What it does there is tested beside it."""

import pytest
from fakes import ScriptedRollouts

from posttrain.algorithms.advantages import AdvantagesPerReward, GroupAdvantages, NoBaseline, Spread, Whitening
from posttrain.algorithms.credit import Credit, CutOffPenalty, KlInReward, OverlongPenalty, RewardScaling, TurnCredit
from posttrain.config import LossFnConfig, load_config
from posttrain.recipes.grpo import build_credit, build_objective, build_position, with_dynamic_sampling
from posttrain.roles import RolloutSource
from posttrain.rollouts.dynamic_sampling import DynamicSampling, StreamAndSurplus
from posttrain.types import OpenGroup

ESTIMATOR = "grpo.adv_estimator"
KL = "loss_fn.use_kl_in_reward=true"
SEVERAL = "env.math.rewards={a: {type: math}, b: {type: regex, pattern: x}}"
MEAN = GroupAdvantages(False, False)
RFPP = Whitening("tokens", Spread(0, 1e-8, "variance_floor"))

CREDITS = {
    (): Credit(GroupAdvantages(True, True)),
    ("grpo.normalize_rewards=false",): Credit(GroupAdvantages(False, True)),
    (f"{ESTIMATOR}.use_leave_one_out_baseline=false",): Credit(GroupAdvantages(True, False)),
    (f"{ESTIMATOR}.name=rloo",): Credit(GroupAdvantages(False, True)),
    (f"{ESTIMATOR}.name=dr_grpo",): Credit(MEAN),
    (f"{ESTIMATOR}.name=reinforce_plus_plus",): Credit(MEAN, whitening=RFPP),
    (f"{ESTIMATOR}={{name: reinforce_plus_plus, minus_baseline: false}}",): Credit(NoBaseline(), whitening=RFPP),
    (f"{ESTIMATOR}={{name: reinforce_plus_plus, whiten_advantages: none}}",): Credit(MEAN),
    (f"{ESTIMATOR}={{name: gdpo, reward_weights: [2, 1]}}", SEVERAL): Credit(
        AdvantagesPerReward(GroupAdvantages(), (2.0, 1.0)), whitening=Whitening("rollouts", Spread(1, 0.0))
    ),
    (f"{ESTIMATOR}={{std_over: batch, std_ddof: 0, std_epsilon: 0.5, std_epsilon_form: variance_plus}}",): Credit(
        GroupAdvantages(True, True, "batch", Spread(0, 0.5, "variance_plus"))
    ),
    (f"{ESTIMATOR}={{whiten_advantages: tokens, std_epsilon: 1e-5, group_of_one: reward}}",): Credit(
        GroupAdvantages(True, True, "group", Spread(1, 1e-5), "reward"), whitening=Whitening("tokens", Spread(1, 1e-5))
    ),
    (KL,): Credit(GroupAdvantages(), kl=KlInReward(0.01, "sequence")),
    (KL, f"{ESTIMATOR}.name=reinforce_plus_plus"): Credit(MEAN, whitening=RFPP, kl=KlInReward(0.01, "token")),
    (
        KL,
        f"{ESTIMATOR}.kl_in_reward=return",
        "loss_fn={reference_policy_kl_penalty: 0.2, reference_policy_kl_type: k1}",
        "loss_fn={kl_input_clamp_value: null, kl_output_clamp_value: 3}",
    ): Credit(GroupAdvantages(), kl=KlInReward(0.2, "return", "k1", None, 3.0)),
    (
        "grpo.turn_credit={enabled: true, discount: 0.5}",
        "grpo.max_rollout_turns=2",
        "env.math.turns=calculator",
    ): Credit(GroupAdvantages(), turns=TurnCredit(0.5)),
    ("grpo={advantage_clip_low: -2, advantage_clip_high: 3}",): Credit(GroupAdvantages(), clip_low=-2.0, clip_high=3.0),
    ("grpo.reward_scaling={enabled: true, source_min: -1, target_max: 5}",): Credit(
        GroupAdvantages(), reward_steps=(RewardScaling(-1.0, 1.0, 0.0, 5.0),)
    ),
    ("grpo.reward_shaping={enabled: true, overlong_buffer_length: 9, overlong_buffer_penalty: 2}",): Credit(
        GroupAdvantages(), reward_steps=(OverlongPenalty(512, 9, 2.0),)
    ),
    (
        "grpo.reward_scaling.enabled=true",
        "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5}",
    ): Credit(GroupAdvantages(), reward_steps=(RewardScaling(), CutOffPenalty(0.5))),
}


@pytest.mark.parametrize(("overrides", "expected"), CREDITS.items(), ids=lambda value: str(value)[:70])
def test_credit(overrides: tuple[str, ...], expected: Credit) -> None:
    assert build_credit(load_config("grpo", None, list(overrides)).config) == expected


def test_dynamic_sampling() -> None:
    inner = ScriptedRollouts([])
    position = StreamAndSurplus(inner)

    def source(*overrides: str, told: list[OpenGroup] | None = None) -> RolloutSource:
        config = load_config("grpo", None, ["grpo.num_prompts_per_step=5", *overrides]).config
        return with_dynamic_sampling(
            config, inner, build_position(config, inner), None if told is None else told.append
        )

    assert source() is inner
    assert source("grpo.use_dynamic_sampling=true") == DynamicSampling(inner, position, 5, 10, keeps_surplus=True)
    told: list[OpenGroup] = []
    listening = source("grpo.use_dynamic_sampling=true", told=told)
    assert listening == DynamicSampling(inner, position, 5, 10, when_earlier=told.append)
    scaled = source("grpo.use_dynamic_sampling=true", "grpo.reward_scaling={enabled: true, target_min: -1}")
    assert scaled == DynamicSampling(inner, position, 5, 10, scaling=RewardScaling(target_min=-1.0))
    given = "grpo={use_dynamic_sampling: true, batch_multiplier: 1.5, dynamic_sampling_surplus: discard}"
    assert source(
        given, "grpo.dynamic_sampling_max_gen_batches=3", f"{ESTIMATOR}.name=gdpo", SEVERAL
    ) == DynamicSampling(inner, position, 7, 3, keeps_surplus=False, looks_at_parts=True)


LOSSES = {
    "ratio_ceiling": 2.5,
    "log_ratio_clamp_value": 20.0,
    "kl_importance_weight": "none",
    "loss_normalizer": "max_tokens",
    "max_response_tokens": 99,
    "positive_example_nll_weight": 0.2,
    "sequence_ratio_type": "product",
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    whole = ["loss_fn={sequence_level_importance_ratios: true, token_level_loss: false}"] if "type" in name else []
    objective = build_objective(load_config("grpo", None, [f"loss_fn.{name}={LOSSES[name]}", *whole]).config)
    assert getattr(objective.config, name) == LOSSES[name]
    assert getattr(LossFnConfig(reference_policy_kl_penalty=0.0), name) != LOSSES[name]


def test_kl_is_charged_once() -> None:
    objective = build_objective(load_config("grpo", None, [KL]).config)
    assert objective.config.reference_policy_kl_penalty == 0
    assert not objective.needs_reference


def test_dr_grpo_divides_by_a_constant_length_by_default() -> None:
    named = f"{ESTIMATOR}.name=dr_grpo"
    objective = build_objective(load_config("grpo", None, [named, "policy.generation.max_new_tokens=77"]).config)
    assert (objective.config.loss_normalizer, objective.config.max_response_tokens) == ("max_tokens", 77)
    told = build_objective(load_config("grpo", None, [named, "loss_fn.loss_normalizer=tokens"]).config)
    assert told.config.loss_normalizer == "tokens"
