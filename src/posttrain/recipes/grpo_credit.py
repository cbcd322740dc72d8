"""Credit from the config of a GRPO run: which groups are trained on, how rewards become advantages, and the loss."""

from __future__ import annotations

from posttrain.algorithms.advantages import ESTIMATORS, Spread, Whitening
from posttrain.algorithms.credit import Credit, KlInReward
from posttrain.algorithms.reward_shaping import CutOffPenalty, OverlongPenalty, RewardScaling, RewardStep
from posttrain.config import AdvEstimatorConfig, GrpoRunConfig
from posttrain.orchestration.sampler_check import CheckedEngine
from posttrain.orchestration.workers import deadline_s
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.recipes.recipe import RunParts
from posttrain.roles import RolloutSource, Stateful
from posttrain.rollouts.dynamic_sampling import DynamicSampling
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.pipelined import PipelinedRollouts
from posttrain.rollouts.rounds import RoundRollouts, StreamAndOpenGroups
from posttrain.rollouts.surplus import StreamAndSurplus


def build_position(config: GrpoRunConfig, stream: Stateful) -> Stateful:
    """What a checkpoint holds of the data: the position in the stream, and groups for later steps where there are any."""
    if config.grpo.async_grpo.enabled:
        return StreamAndOpenGroups(stream)
    return StreamAndSurplus(stream) if config.grpo.use_dynamic_sampling else stream


def with_rounds(config: GrpoRunConfig, fresh: FreshRollouts, position: Stateful, parts: RunParts) -> RolloutSource:
    """`fresh` itself if every step samples its own groups."""
    if not isinstance(position, StreamAndOpenGroups):
        return fresh
    rounds = RoundRollouts(
        fresh,
        parts.engine,
        position,
        config.grpo.async_grpo.max_trajectory_age_steps,
        config.num_groups_in_flight,
        parts.max_steps,
    )
    if not config.rounds_ahead:
        return rounds
    # A round makes one call per turn. Each call has its own deadline, whose error names the engine.
    limit_s = deadline_s("sample_round") * (config.grpo.max_rollout_turns + 1)
    compare = parts.engine.compare_short_answers if isinstance(parts.engine, CheckedEngine) else None
    return PipelinedRollouts.start(rounds, parts.weights, limit_s, parts.cleanup, compare)


def with_dynamic_sampling(config: GrpoRunConfig, source: RolloutSource, position: Stateful) -> RolloutSource:
    """The source itself if every group is trained on."""
    grpo = config.grpo
    if not isinstance(position, StreamAndSurplus):
        return source
    return DynamicSampling(
        source,
        position,
        num_per_batch=int(grpo.num_prompts_per_step * grpo.batch_multiplier),
        max_batches=grpo.dynamic_sampling_max_gen_batches,
        keeps_surplus=grpo.dynamic_sampling_surplus == "keep",
        looks_at_parts=ESTIMATORS[grpo.adv_estimator.name].credits_parts,
        scaling=_scaling(config),
    )


def build_credit(config: GrpoRunConfig) -> Credit:
    estimator = config.grpo.adv_estimator
    return Credit(
        ESTIMATORS[estimator.name].build(estimator, _spread(estimator, Spread())),
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
    normalizer = ESTIMATORS[config.grpo.adv_estimator.name].loss_normalizer
    if normalizer is not None and config.loss_fn.loss_normalizer is None:
        changes["loss_normalizer"] = normalizer
    return ClippedPolicyGradient(config.loss_fn.model_copy(update=changes))


def _whitening(config: AdvEstimatorConfig) -> Whitening | None:
    form = ESTIMATORS[config.name]
    over = config.whiten_advantages or form.whiten_over
    return None if over == "none" else Whitening(over, _spread(config, form.whiten_by))


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
    return KlInReward(
        loss.reference_policy_kl_penalty,
        estimator.kl_in_reward or ESTIMATORS[estimator.name].kl_charged_to,
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
    elif shaping.zone is not None:
        steps.append(OverlongPenalty(*shaping.zone))
    return tuple(steps)
