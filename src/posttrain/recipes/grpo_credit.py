"""What a GRPO config says of credit: which groups are trained on, how rewards become advantages, and the loss."""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages import (
    AdvantagesPerReward,
    Estimator,
    GroupAdvantages,
    RewardsThemselves,
    Spread,
    Whitening,
)
from posttrain.algorithms.credit import Credit, KlInReward
from posttrain.algorithms.reward_shaping import CutOffPenalty, OverlongPenalty, RewardScaling, RewardStep
from posttrain.config import AdvEstimatorConfig, GrpoRunConfig
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.roles import RolloutSource, Stateful
from posttrain.rollouts.dynamic_sampling import DynamicSampling, StreamAndSurplus

# What a null in the config stands for, by estimator; every other one has the first.
WHITENED_OVER = {"reinforce_plus_plus": "tokens", "gdpo": "rollouts"}
WHITENED_BY = {"reinforce_plus_plus": Spread(0, 1e-8, "variance_floor"), "gdpo": Spread(1, 0.0, "std_plus")}
KL_CHARGED_TO = {"reinforce_plus_plus": "token", "gdpo": "token"}


def build_position(config: GrpoRunConfig, stream: Stateful) -> Stateful:
    """What a checkpoint holds of the data: the position in the stream and, with dynamic sampling, unused groups."""
    return StreamAndSurplus(stream) if config.grpo.use_dynamic_sampling else stream


def with_dynamic_sampling(config: GrpoRunConfig, source: RolloutSource, position: Stateful) -> RolloutSource:
    """The source itself where every group is trained on."""
    grpo = config.grpo
    if not isinstance(position, StreamAndSurplus):
        return source
    return DynamicSampling(
        source,
        position,
        num_per_batch=int(grpo.num_prompts_per_step * grpo.batch_multiplier),
        max_batches=grpo.dynamic_sampling_max_gen_batches,
        keeps_surplus=grpo.dynamic_sampling_surplus == "keep",
        looks_at_parts=grpo.adv_estimator.name == "gdpo",
        scaling=_scaling(config),
    )


def build_credit(config: GrpoRunConfig) -> Credit:
    estimator = config.grpo.adv_estimator
    return Credit(
        _estimator(estimator),
        reward_steps=_reward_steps(config),
        whitening=_whitening(estimator),
        kl=_kl_in_reward(config),
        clip_low=config.grpo.advantage_clip_low,
        clip_high=config.grpo.advantage_clip_high,
    )


def build_objective(config: GrpoRunConfig) -> ClippedPolicyGradient:
    changes: dict[str, object] = {}
    if config.loss_fn.use_kl_in_reward:
        changes["reference_policy_kl_penalty"] = 0.0
    if config.grpo.adv_estimator.name == "dr_grpo" and config.loss_fn.loss_normalizer is None:
        changes["loss_normalizer"] = "max_tokens"
    return ClippedPolicyGradient(config.loss_fn.model_copy(update=changes))


def _estimator(config: AdvEstimatorConfig) -> Estimator:
    spread = _spread(config, Spread())

    def compared(normalize: bool, leave_one_out: bool) -> GroupAdvantages:
        return GroupAdvantages(normalize, leave_one_out, config.std_over, spread, config.group_of_one)

    if config.name == "reinforce_plus_plus":
        return compared(False, False) if config.minus_baseline else RewardsThemselves()
    if config.name == "rloo":
        return compared(False, True)
    if config.name == "dr_grpo":
        return compared(False, False)
    own = compared(config.normalize_rewards, config.use_leave_one_out_baseline)
    if config.name == "gdpo":
        return AdvantagesPerReward(own, tuple(config.reward_weights) if config.reward_weights is not None else None)
    assert config.name == "grpo", f"{config.name} is refused when the config is loaded"
    return own


def _whitening(config: AdvEstimatorConfig) -> Whitening | None:
    over: Any = config.whiten_advantages or WHITENED_OVER.get(config.name, "none")
    if over == "none":
        return None
    return Whitening(over, _spread(config, WHITENED_BY.get(config.name, Spread())))


def _spread(config: AdvEstimatorConfig, own: Spread) -> Spread:
    return Spread(
        own.ddof if config.std_ddof is None else config.std_ddof,
        own.epsilon if config.std_epsilon is None else config.std_epsilon,
        own.form if config.std_epsilon_form is None else config.std_epsilon_form,
    )


def _kl_in_reward(config: GrpoRunConfig) -> KlInReward | None:
    loss, estimator = config.loss_fn, config.grpo.adv_estimator
    if not loss.use_kl_in_reward:
        return None
    charged_to: Any = estimator.kl_in_reward or KL_CHARGED_TO.get(estimator.name, "sequence")
    return KlInReward(
        loss.reference_policy_kl_penalty,
        charged_to,
        loss.reference_policy_kl_type,
        loss.kl_input_clamp_value,
        loss.kl_output_clamp_value,
    )


def _scaling(config: GrpoRunConfig) -> RewardScaling | None:
    scaling = config.grpo.reward_scaling
    if not scaling.enabled:
        return None
    return RewardScaling(scaling.source_min, scaling.source_max, scaling.target_min, scaling.target_max)


def _reward_steps(config: GrpoRunConfig) -> tuple[RewardStep, ...]:
    scaling, shaping = _scaling(config), config.grpo.reward_shaping
    steps: list[RewardStep] = [] if scaling is None else [scaling]
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        steps.append(CutOffPenalty(shaping.stop_properly_penalty_coef))
    elif shaping.enabled:
        length, zone = shaping.max_response_length, shaping.overlong_buffer_length
        assert length is not None, "refused when the config is loaded"
        assert zone is not None, "refused when the config is loaded"
        assert shaping.overlong_buffer_penalty is not None, "refused when the config is loaded"
        steps.append(OverlongPenalty(length, zone, shaping.overlong_buffer_penalty))
    return tuple(steps)
