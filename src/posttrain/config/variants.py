"""What the settings of GRPO's variants must agree on: estimators, rewards, dynamic sampling, normalisers of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from posttrain.config.grpo import GrpoConfig, GrpoRunConfig
from posttrain.config.loss import LossFnConfig

IsSetByUser = Callable[[str], bool]

# The switch, and the settings that mean nothing while it is off.
_SWITCHES = {
    "grpo.async_grpo.enabled": ("grpo.async_grpo.max_trajectory_age_steps", "grpo.async_grpo.groups_in_flight"),
    "grpo.use_dynamic_sampling": ("grpo.dynamic_sampling_max_gen_batches", "grpo.dynamic_sampling_surplus"),
    "grpo.reward_shaping.enabled": (
        "grpo.reward_shaping.overlong_buffer_length",
        "grpo.reward_shaping.overlong_buffer_penalty",
        "grpo.reward_shaping.stop_properly_penalty_coef",
    ),
    "grpo.reward_scaling.enabled": (
        "grpo.reward_scaling.source_min",
        "grpo.reward_scaling.source_max",
        "grpo.reward_scaling.target_min",
        "grpo.reward_scaling.target_max",
    ),
    "loss_fn.use_kl_in_reward": ("grpo.adv_estimator.kl_in_reward",),
}
# The settings of adv_estimator that only some estimators read.
_READ_BY = {
    "normalize_rewards": ("grpo", "gdpo"),
    "use_leave_one_out_baseline": ("grpo", "gdpo"),
    "std_over": ("grpo", "gdpo"),
    "minus_baseline": ("reinforce_plus_plus",),
    "reward_weights": ("gdpo",),
}


def check_variants(config: GrpoRunConfig) -> Iterator[str]:
    yield from _dynamic_sampling(config)
    yield from _rewards(config)
    yield from _estimator(config)
    yield from _loss(config.loss_fn)


def normalizer(loss: LossFnConfig) -> str:
    return loss.loss_normalizer or ("tokens" if loss.token_level_loss else "sequences")


def compares_within_group(config: GrpoRunConfig) -> bool:
    """Whether an answer that is alone in its group has nothing to be compared with."""
    estimator = config.grpo.adv_estimator
    if estimator.name == "reinforce_plus_plus":
        return estimator.minus_baseline
    return estimator.group_of_one == "zero"


def unused_variants(config: GrpoRunConfig, is_set: IsSetByUser) -> list[str]:
    """Settings that were written, that differ from the default, and that nothing reads."""
    found = []

    def is_changed(key: str) -> bool:
        section, *rest = key.split(".")
        default: Any = {"grpo": GrpoConfig, "loss_fn": LossFnConfig}[section]()
        value: Any = getattr(config, section)
        for name in rest:
            default, value = getattr(default, name), getattr(value, name)
        return is_set(key) and bool(value != default)

    on = {
        "grpo.async_grpo.enabled": config.grpo.async_grpo.enabled,
        "grpo.use_dynamic_sampling": config.grpo.use_dynamic_sampling,
        "grpo.reward_shaping.enabled": config.grpo.reward_shaping.enabled,
        "grpo.reward_scaling.enabled": config.grpo.reward_scaling.enabled,
        "loss_fn.use_kl_in_reward": config.loss_fn.use_kl_in_reward,
    }
    for switch, settings in _SWITCHES.items():
        written = [key for key in settings if is_changed(key)]
        if written and not on[switch]:
            found.append(
                f"{', '.join(written)}: {switch} is off, so {'it is' if len(written) == 1 else 'they are'} not used"
            )
    name = config.grpo.adv_estimator.name
    for key, readers in _READ_BY.items():
        if is_changed(f"grpo.adv_estimator.{key}") and name not in readers:
            found.append(
                f"grpo.adv_estimator.{key}: read by {' and '.join(readers)} only, and adv_estimator.name is {name}"
            )
    found += _unused_resources(config)
    shaping, longest = config.grpo.reward_shaping, config.policy.generation.max_new_tokens
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and shaping.max_response_length is not None:
        begins = shaping.max_response_length - (shaping.overlong_buffer_length or 0)
        if begins >= longest:
            found.append(
                f"grpo.reward_shaping: the penalty begins at {begins} tokens, but answers end at "
                f"policy.generation.max_new_tokens = {longest}: lower max_response_length"
            )
    return found


def _unused_resources(config: GrpoRunConfig) -> Iterator[str]:
    colocated = config.policy.generation.colocated
    for name, value in colocated.resources.model_dump().items():
        if colocated.enabled and value not in (None, getattr(config.cluster, name)):
            yield (
                f"policy.generation.colocated.resources.{name} = {value}: policy.generation.colocated.enabled is true, so all "
                "GPUs train and sample; set that to false for GPUs that only sample"
            )


def _dynamic_sampling(config: GrpoRunConfig) -> Iterator[str]:
    grpo = config.grpo
    if not grpo.use_dynamic_sampling:
        if grpo.batch_multiplier != 1:
            yield (
                f"grpo.batch_multiplier = {grpo.batch_multiplier:g} draws other prompts than are trained, which needs "
                "grpo.use_dynamic_sampling = true: set that, or batch_multiplier=1"
            )
        return
    if int(grpo.num_prompts_per_step * grpo.batch_multiplier) < 1:
        yield (
            f"grpo.batch_multiplier = {grpo.batch_multiplier:g} of grpo.num_prompts_per_step = {grpo.num_prompts_per_step} "
            "is less than one prompt: raise it"
        )
    if config.loss_fn.force_on_policy_ratio and grpo.dynamic_sampling_surplus == "keep":
        yield (
            "loss_fn.force_on_policy_ratio and grpo.dynamic_sampling_surplus = keep exclude each other: groups that are kept "
            "for the next step were not sampled by its policy; set dynamic_sampling_surplus=discard"
        )
    if grpo.num_generations_per_prompt == 1:
        yield (
            "grpo.use_dynamic_sampling keeps groups whose rewards differ, and a group of "
            "grpo.num_generations_per_prompt = 1 never does: sample at least 2 per prompt"
        )


def _rewards(config: GrpoRunConfig) -> Iterator[str]:
    scaling, shaping = config.grpo.reward_scaling, config.grpo.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield (
            f"grpo.reward_scaling.source_min = {scaling.source_min:g} must be below source_max = {scaling.source_max:g}"
        )
    if not shaping.enabled:
        return
    if config.grpo.adv_estimator.name == "gdpo":
        yield "grpo.reward_shaping changes the total reward, but gdpo credits its parts: set reward_shaping.enabled=false"
    if shaping.stop_properly_penalty_coef is not None:
        return
    buffer, longest = shaping.overlong_buffer_length, shaping.max_response_length
    missing = [
        name
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        if getattr(shaping, name) is None
    ]
    if missing:
        yield f"grpo.reward_shaping.enabled needs {', '.join(missing)}, or stop_properly_penalty_coef instead"
    elif buffer is not None and longest is not None and buffer > longest:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length = {buffer} is longer than max_response_length = {longest}: the "
            "penalty grows over the last tokens before that length"
        )


def _estimator(config: GrpoRunConfig) -> Iterator[str]:
    estimator, loss = config.grpo.adv_estimator, config.loss_fn
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        yield (
            "loss_fn.use_kl_in_reward charges loss_fn.reference_policy_kl_penalty, which is 0: set it above 0, or "
            "use_kl_in_reward=false"
        )
    if loss.use_kl_in_reward and estimator.name == "gdpo" and estimator.kl_in_reward == "sequence":
        yield "grpo.adv_estimator.kl_in_reward = sequence charges the total reward, but gdpo credits its parts: use token"
    if estimator.name == "gdpo":
        yield from _gdpo(config)
    if estimator.name == "rloo" and config.grpo.num_generations_per_prompt == 1:
        yield (
            "grpo.adv_estimator.name = rloo compares with the other answers of the group, and "
            "grpo.num_generations_per_prompt = 1 leaves none: sample at least 2 per prompt"
        )


def _gdpo(config: GrpoRunConfig) -> Iterator[str]:
    named = {entry.env_name for entry in config.data.train_sets()}
    rewards = {name: block.reward_configs(name) for name, block in config.env.items() if name in named}
    for name, own in rewards.items():
        # What a function of the user's own returns may well be parts of a reward; what our types add to theirs is not.
        if set(own) == {""} and own[""].type != "python":
            yield (
                f"grpo.adv_estimator.name = gdpo credits several rewards one by one, and env.{name} has a single one, of type "
                f"{own[''].type}: name several in env.{name}.rewards, or use grpo"
            )
    weights = {
        f"env.{name}.rewards.{part}.weight": reward.weight
        for name, own in rewards.items()
        for part, reward in own.items()
        if reward.weight != 1
    }
    if weights and config.grpo.adv_estimator.reward_weights is None:
        yield (
            f"{', '.join(f'{key} = {weight:g}' for key, weight in weights.items())}: gdpo credits each reward on its own, by "
            "grpo.adv_estimator.reward_weights, which is not set: give one weight for each, in alphabetical order"
        )


def _loss(loss: LossFnConfig) -> Iterator[str]:
    if loss.kl_importance_weight is not None and loss.use_on_policy_kl_approximation:
        yield (
            f"loss_fn.kl_importance_weight = {loss.kl_importance_weight} and loss_fn.use_on_policy_kl_approximation both say "
            "how the KL is weighted: set one of them"
        )
    if loss.loss_normalizer == "max_tokens" and loss.max_response_tokens is None:
        yield "loss_fn.loss_normalizer = max_tokens needs loss_fn.max_response_tokens, e.g. policy.generation.max_new_tokens"
    if loss.sequence_ratio_type == "product" and not loss.sequence_level_importance_ratios:
        yield (
            "loss_fn.sequence_ratio_type = product is about the ratio of a whole answer: it needs "
            "loss_fn.sequence_level_importance_ratios = true"
        )
    if loss.ratio_ceiling is not None and (loss.use_cispo or loss.disable_ppo_ratio):
        other = "use_cispo" if loss.use_cispo else "disable_ppo_ratio"
        yield f"loss_fn.ratio_ceiling bounds the ratio of the clipped loss, which loss_fn.{other} does not have: unset one"
