"""`grpo` and `loss_fn`: sampling, advantages and validation; the clipped policy-gradient loss and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from posttrain.config.base import (
    Fraction,
    FreeMap,
    IsSetByUser,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    UsedIf,
    setting,
)
from posttrain.config.run_config import ScheduleConfig

_IF_ENABLED = UsedIf("enabled")
_IF_DYNAMIC = UsedIf("use_dynamic_sampling")
_IF_GAE = UsedIf("name", ("gae",))
_IF_SOFT = UsedIf("trust_region", ("soft",))
_IF_COMPARED = UsedIf("name", ("grpo", "gdpo"))


class OverlongZone(NamedTuple):
    """Where the penalty of long answers grows, in tokens, and what it grows to."""

    max_length: int
    buffer_length: int
    penalty: float


class RewardShapingConfig(Section):
    enabled: bool = setting(False, "Changes rewards of answers that are long or cut off.")
    overlong_buffer_length: Annotated[PositiveInt | None, _IF_ENABLED] = setting(
        128, "Tokens before max_response_length in which the length penalty grows."
    )
    overlong_buffer_penalty: Annotated[NonNegativeFloat | None, _IF_ENABLED] = setting(
        1.0, "Reward subtracted at the end of the buffer zone."
    )
    max_response_length: PositiveInt | None = setting(None, "Answer length in tokens at which the zone ends.")
    stop_properly_penalty_coef: Annotated[Fraction | None, _IF_ENABLED] = setting(
        None, "Factor on rewards of answers that were cut off; when set, the length penalty is not used."
    )

    @property
    def zone(self) -> OverlongZone | None:
        """None where long answers are not penalised, or what that takes is missing."""
        length, buffer, penalty = self.max_response_length, self.overlong_buffer_length, self.overlong_buffer_penalty
        if not self.enabled or self.stop_properly_penalty_coef is not None:
            return None
        return None if length is None or buffer is None or penalty is None else OverlongZone(length, buffer, penalty)

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        if not self.enabled or self.stop_properly_penalty_coef is not None:
            return
        needed = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        if missing := [name for name in needed if getattr(self, name) is None]:
            yield f"grpo.reward_shaping.enabled needs {', '.join(missing)}, or stop_properly_penalty_coef instead"
        elif self.zone is not None and self.zone.buffer_length > self.zone.max_length:
            yield (
                f"grpo.reward_shaping.overlong_buffer_length = {self.zone.buffer_length} is longer than "
                f"max_response_length = {self.zone.max_length}: the penalty grows over the last tokens before that "
                "length"
            )


class RewardScalingConfig(Section):
    enabled: bool = setting(False, "Maps rewards linearly from the source range to the target range.")
    source_min: Annotated[float, _IF_ENABLED] = setting(0.0, "Lower end of incoming rewards; lower ones are clamped.")
    source_max: Annotated[float, _IF_ENABLED] = setting(1.0, "Upper end of incoming rewards; higher ones are clamped.")
    target_min: Annotated[float, _IF_ENABLED] = setting(0.0, "Reward that source_min becomes.")
    target_max: Annotated[float, _IF_ENABLED] = setting(1.0, "Reward that source_max becomes.")

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        if self.enabled and self.source_min >= self.source_max:
            yield f"grpo.reward_scaling.source_min = {self.source_min:g} must be below source_max = {self.source_max:g}"


class AdvEstimatorConfig(Section):
    name: Literal["grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo", "gae", "opd"] = setting(
        "grpo",
        "How rewards become advantages: against the group or all, (gdpo) part by part, or (gae, PPO) by a critic.",
    )
    normalize_rewards: Annotated[bool, _IF_COMPARED] = setting(
        True, "grpo, gdpo: divides the advantage by the standard deviation of its group."
    )
    use_leave_one_out_baseline: Annotated[bool, _IF_COMPARED] = setting(
        True, "grpo, gdpo: the baseline is the mean of the other answers of the group, not of all of them."
    )
    minus_baseline: Annotated[bool, UsedIf("name", ("reinforce_plus_plus",))] = setting(
        True, "reinforce_plus_plus: subtracts the group mean."
    )
    reward_weights: Annotated[list[float] | None, UsedIf("name", ("gdpo",))] = setting(
        None, "gdpo: weight of each reward part, in alphabetical order."
    )
    gae_lambda: Annotated[Fraction, _IF_GAE] = setting(
        0.95, "gae: 1 takes the whole return less the value, 0 the next value only."
    )
    gae_gamma: Annotated[Fraction, _IF_GAE] = setting(1.0, "gae: discount of each token.")
    std_over: Annotated[Literal["group", "others", "batch"], _IF_COMPARED] = setting(
        "group",
        "grpo, gdpo: whose rewards the standard deviation is of: the group's, the step's, or (NeMo RL) those that the "
        "baseline is of.",
    )
    std_ddof: Literal[0, 1] | None = setting(
        None, "What is taken from the count in a variance; null is the estimator's own, 1 or (reinforce_plus_plus) 0."
    )
    std_epsilon: NonNegativeFloat | None = setting(
        None, "What keeps a divisor from 0; null is 1e-6, or 1e-8 (reinforce_plus_plus) and 0 (gdpo) for whitening."
    )
    std_epsilon_form: Literal["std_plus", "variance_plus", "variance_floor"] | None = setting(
        None, "Where it stands: std + e, sqrt(variance + e) or sqrt(max(variance, e)); null is the estimator's own."
    )
    group_of_one: Literal["zero", "reward"] = setting("zero", "Advantage of the only scored answer of a group.")
    whiten_advantages: Literal["none", "rollouts", "tokens"] | None = setting(
        None,
        "Over what advantages get mean 0, variance 1; null: reinforce_plus_plus, gae tokens, gdpo rollouts, else none.",
    )
    kl_in_reward: Literal["sequence", "token", "return"] | None = setting(
        None, "What loss_fn.use_kl_in_reward charges: the answer, each token, or all tokens before; null is its own."
    )

    @property
    def compares_within_group(self) -> bool:
        """Whether an answer that is alone in its group has nothing to be compared with."""
        if self.name == "reinforce_plus_plus":
            return self.minus_baseline
        return self.name != "gae" and self.group_of_one == "zero"


class TurnCreditConfig(Section):
    enabled: bool = setting(
        False, "Credits the tokens of a turn with the rewards from that turn on; false: all with the sum of all turns."
    )
    discount: Annotated[Fraction, _IF_ENABLED] = setting(
        1.0, "Factor on a reward for each turn that it comes later; 0 credits a turn with its own reward only."
    )


class AsyncGrpoConfig(Section):
    enabled: bool = setting(
        False, "Trains on the groups that are finished first; unfinished answers continue with the next step's weights."
    )
    max_trajectory_age_steps: Annotated[NonNegativeInt, _IF_ENABLED] = setting(
        1, "Steps that a group may be trained after the one that began it; 0 is synchronous."
    )
    groups_in_flight: Annotated[Annotated[float, Field(ge=1)] | None, _IF_ENABLED] = setting(
        None,
        "Groups that are sampled at once, in multiples of num_prompts_per_step; null is 1 + max age / 2, with engines "
        "on GPUs of their own (max age + 1) / 2.",
    )


class GrpoConfig(ScheduleConfig):
    num_prompts_per_step: PositiveInt = setting(32, "Prompts sampled and trained in each step.")
    num_generations_per_prompt: PositiveInt = setting(16, "Answers sampled for each prompt: the group size.")
    num_recorded_per_prompt: PositiveInt | None = setting(
        None, "Of the answers of a prompt, those taken from labelled traces (TraceGroups); null is all, none fresh."
    )
    policy_training_start_step: NonNegativeInt = setting(
        0, "PPO: steps at the beginning in which only the critic is trained."
    )
    max_rollout_turns: PositiveInt = setting(
        1, "Turns of the model in one rollout, if the environment has `turns` or `agent`."
    )
    normalize_rewards: bool = setting(
        True, "Default of adv_estimator.normalize_rewards: divides by the group's standard deviation."
    )
    use_leave_one_out_baseline: bool = setting(
        True, "Default of adv_estimator.use_leave_one_out_baseline: the baseline leaves the answer itself out."
    )
    val_start_at: int = setting(-1, "First step at which periodic validation may run; -1 is from the start.")
    overlong_filtering: bool = setting(
        False, "Leaves answers that hit the length limit out of the loss; they still count in the baseline."
    )
    advantage_clip_low: float | None = setting(None, "Lower bound of the advantages; null is unbounded.")
    advantage_clip_high: float | None = setting(None, "Upper bound of the advantages; null is unbounded.")
    max_val_samples: PositiveInt | None = setting(256, "Prompts used by a validation; null uses all of them.")
    val_num_generations_per_prompt: PositiveInt = setting(1, "Answers per validation prompt; several report pass@k.")
    stop_at_validation_metric: str | None = setting(
        None, "Validation metric that ends the run early, e.g. accuracy; needs the threshold."
    )
    stop_at_validation_threshold: float | None = setting(
        None, "Value of stop_at_validation_metric at or above which the run saves and ends."
    )
    use_dynamic_sampling: bool = setting(False, "Samples until enough groups have rewards that differ (DAPO).")
    dynamic_sampling_max_gen_batches: Annotated[PositiveInt, _IF_DYNAMIC] = setting(
        10, "Batches that dynamic sampling may generate for one step."
    )
    dynamic_sampling_surplus: Annotated[Literal["keep", "discard"], _IF_DYNAMIC] = setting(
        "keep", "What becomes of groups beyond those that a step needs: the next step's, or lost."
    )
    batch_multiplier: PositiveFloat = setting(
        1.0, "Prompts in one batch of dynamic sampling, as a multiple of num_prompts_per_step."
    )
    seq_logprob_error_threshold: PositiveFloat | None = setting(
        None, "Drops answers whose mean exp(|sampler - trainer logprob|) is above this; null keeps all."
    )
    skip_reference_policy_logprobs_calculation: bool = setting(
        False, "Does without the reference; needs loss_fn.reference_policy_kl_penalty 0, which implies it."
    )
    reward_shaping: RewardShapingConfig = setting(RewardShapingConfig, "Penalties for long or cut-off answers.")
    reward_scaling: RewardScalingConfig = setting(RewardScalingConfig, "Linear map from one reward range to another.")
    turn_credit: TurnCreditConfig = setting(TurnCreditConfig, "Rewards of turns as advantages of their tokens.")
    async_grpo: AsyncGrpoConfig = setting(AsyncGrpoConfig, "Asynchronous sampling.")
    adv_estimator: AdvEstimatorConfig = setting(AdvEstimatorConfig, "How rewards become advantages.")

    @property
    def num_samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def num_recorded(self) -> int:
        """Of each prompt, where the data are labelled traces."""
        return self.num_recorded_per_prompt or self.num_generations_per_prompt

    @property
    def num_fresh_per_prompt(self) -> int:
        """Answers sampled beside the recorded ones."""
        return self.num_generations_per_prompt - self.num_recorded

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            yield f"grpo.advantage_clip_low = {low:g} must be below grpo.advantage_clip_high = {high:g}"
        if (self.stop_at_validation_metric is None) != (self.stop_at_validation_threshold is None):
            yield (
                f"grpo.stop_at_validation_metric = {self.stop_at_validation_metric} and "
                f"grpo.stop_at_validation_threshold = {self.stop_at_validation_threshold} go together: set both or "
                "neither"
            )
        yield from self._sampling_problems()
        yield from self._estimator_problems()

    def _sampling_problems(self) -> Iterator[str]:
        if not self.use_dynamic_sampling:
            if self.batch_multiplier != 1:
                yield (
                    f"grpo.batch_multiplier = {self.batch_multiplier:g} draws other prompts than are trained, which "
                    "needs grpo.use_dynamic_sampling = true: set that, or batch_multiplier=1"
                )
            return
        if int(self.num_prompts_per_step * self.batch_multiplier) < 1:
            yield f"grpo.batch_multiplier = {self.batch_multiplier:g} of a step's prompts is less than one: raise it"
        if self.num_generations_per_prompt == 1:
            yield "grpo.use_dynamic_sampling needs groups that differ: set grpo.num_generations_per_prompt to 2 or more"

    def _estimator_problems(self) -> Iterator[str]:
        estimator = self.adv_estimator
        if estimator.name == "gdpo" and self.reward_shaping.enabled:
            yield "grpo.reward_shaping changes the total reward, but gdpo credits its parts: set enabled=false"
        if estimator.name == "gae" and estimator.whiten_advantages == "rollouts":
            yield "grpo.adv_estimator.whiten_advantages = rollouts: with gae each token has its own; use tokens or none"
        if estimator.name == "gae" and self.turn_credit.enabled:
            yield "grpo.turn_credit.enabled = true: with gae the critic credits tokens; set it to false"
        if estimator.name == "gae" and estimator.kl_in_reward not in (None, "token"):
            yield f"grpo.adv_estimator.kl_in_reward = {estimator.kl_in_reward}: gae charges each token; set it to token"
        if self.num_generations_per_prompt > 1:
            return
        if estimator.name == "rloo":
            yield "grpo.adv_estimator.name = rloo compares answers: set grpo.num_generations_per_prompt to 2 or more"
        for name in ("normalize_rewards", "use_leave_one_out_baseline"):
            if estimator.name in ("grpo", "gdpo") and estimator.compares_within_group and getattr(estimator, name):
                yield (
                    f"grpo.num_generations_per_prompt = 1 and grpo.adv_estimator.{name} = true: one answer has no "
                    f"spread and no others to compare with; sample at least 2 per prompt, or set grpo.{name}=false"
                )

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        if self.num_generations_per_prompt == 1 and self.adv_estimator.compares_within_group:
            yield "grpo.num_generations_per_prompt: a group of 1 has advantage 0, so nothing is learnt from rewards"


class TeacherConfig(Section):
    """On-policy distillation."""

    model_name: str | None = setting(
        None, "Folder (also of a run) or hub name of a model with the policy's tokenizer to distil from; null: none."
    )
    divergence: Literal["reverse", "forward", "jsd"] = setting(
        "reverse", "KL(policy || teacher), KL(teacher || policy), or Jensen-Shannon, of each token."
    )
    over: Literal["vocabulary", "top_k", "sampled"] = setting(
        "vocabulary",
        "What a divergence is over: all tokens, the teacher's likeliest and the rest as one, or the sampled token.",
    )
    top_k: Annotated[PositiveInt, UsedIf("over", ("top_k",))] = setting(64, "Tokens of the teacher with over: top_k.")
    weight: NonNegativeFloat = setting(1.0, "Weight of the divergence in the loss.")
    reward_weight: NonNegativeFloat = setting(
        0.0, "Weight of GRPO's loss beside it; 0: rewards are not trained on, and no `env` is needed."
    )

    @property
    def compared_numbers(self) -> int:
        """In fp32, that live of each logit while a divergence is differentiated (policy/objectives/distillation.py)."""
        if self.over != "vocabulary":
            return {"top_k": 5, "sampled": 4}[self.over]
        return 9 if self.divergence == "jsd" else 7


class ValueOptimizerConfig(Section):
    kwargs: FreeMap = setting(dict, "Arguments that differ from policy.optimizer.kwargs, e.g. lr.")


class ValueConfig(Section):
    """PPO's critic."""

    model_name: str | None = setting(
        None,
        "Folder or hub name of a model with the policy's tokenizer, e.g. a reward model; null: the policy's model.",
    )
    optimizer: ValueOptimizerConfig = setting(
        ValueOptimizerConfig, "Its optimizer; the rest is as in policy.optimizer."
    )


class ValueLossConfig(Section):
    scale: PositiveFloat = setting(1.0, "Weight of half the squared error (vf_coeff).")
    cliprange: PositiveFloat | None = setting(
        0.2, "How far values may move from those before the step while that reduces the loss; null does not clip."
    )


class LossFnConfig(Section):
    reference_policy_kl_penalty: NonNegativeFloat = setting(
        0.01, "Weight of the KL term against the frozen reference (beta); 0 loads no reference at all."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = setting(
        "k3", "Estimator of the KL: k1 is the negative log-ratio, k2 half its square, k3 the low-variance one."
    )
    kl_input_clamp_value: PositiveFloat | None = setting(
        20.0, "Log-ratio to the reference is clamped to plus or minus this (nats); null does not clamp."
    )
    kl_output_clamp_value: PositiveFloat | None = setting(
        10.0, "KL of a token, and its advantage with teacher.over: sampled, is clamped to +- this; null does not clamp."
    )
    ratio_clip_min: float = setting(
        0.2, "How far below 1 the probability ratio may fall before it is clipped (epsilon low).", ge=0, le=1
    )
    ratio_clip_max: NonNegativeFloat = setting(
        0.2, "How far above 1 the probability ratio may rise before it is clipped (epsilon high)."
    )
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = setting(
        None, "Dual clip: factor above 1 that bounds the loss where the advantage is negative; null is off."
    )
    ratio_ceiling: PositiveFloat | None = setting(
        None, "Bound of the probability ratio itself, whatever the sign of the advantage (TRL's delta)."
    )
    log_ratio_clamp_value: PositiveFloat | None = setting(
        None, "Log-ratio to the old policy is clamped to plus or minus this (nats); null does not clamp."
    )
    kl_importance_weight: Literal["on_policy", "sampler", "previous", "none"] | None = setting(
        None, "What the KL of a token is weighted by; null is on_policy, or follows use_on_policy_kl_approximation."
    )
    use_on_policy_kl_approximation: bool = setting(
        False, "Weights the KL of a token by exp(current - sampler logprob), which makes it exact off-policy."
    )
    use_importance_sampling_correction: bool = setting(
        False, "Multiplies the loss by exp(trainer - sampler logprob) to correct for engines that differ."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = setting(
        None, "How large corrections are cut: tis clamps, icepop zeroes tokens, seq-mask-tis zeroes sequences."
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = setting(None, "Upper bound of the correction.")
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = setting(
        None, "Lower bound of the importance correction; icepop and seq-mask-tis need it."
    )
    sequence_level_importance_ratios: bool = setting(
        False, "One ratio per answer, the geometric mean over its tokens (GSPO); needs token_level_loss false."
    )
    sequence_ratio_type: Literal["geometric_mean", "product"] = setting(
        "geometric_mean",
        "What the one ratio of an answer is made of: the mean over its tokens (GSPO), or their product (RLOO).",
    )
    token_level_loss: bool = setting(
        True, "Averages over all tokens of the batch; false averages within each answer, then over answers."
    )
    loss_normalizer: Literal["tokens", "sequences", "max_tokens"] | None = setting(
        None, "What the sum is divided by; null follows token_level_loss, and is max_tokens with dr_grpo."
    )
    max_response_tokens: PositiveInt | None = setting(
        None, "Tokens that every answer counts as with the normalizer max_tokens, whatever its length."
    )
    force_on_policy_ratio: bool = setting(
        False, "Takes the ratio as 1 and skips the extra forward pass; needs one optimizer step per RL step."
    )
    use_kl_in_reward: bool = setting(False, "Subtracts the KL from the reward instead of adding it to the loss.")
    trust_region: Literal["clip", "soft", "geometric_mean", "tv", "kl"] = setting(
        "clip",
        "What bounds an update: the clipped ratio; its sigmoid (SAPO); the geometric mean of clipped ratios, with log-"
        "ratios between -ratio_clip_min and ratio_clip_max (GMPO); or (DPPO) no gradient from tokens that keep moving "
        "away beyond ratio_clip_min and ratio_clip_max of the difference of probabilities (tv) or of its binary KL.",
    )
    soft_temperature_pos: Annotated[PositiveFloat, _IF_SOFT] = setting(
        1.0, "soft: steepness of the sigmoid where the advantage is positive."
    )
    soft_temperature_neg: Annotated[PositiveFloat, _IF_SOFT] = setting(
        1.05, "soft: the same where it is not; a higher one lets gradients vanish sooner."
    )
    use_cispo: bool = setting(False, "CISPO: the clipped ratio is a constant weight on the log-probability.")
    disable_ppo_ratio: bool = setting(False, "REINFORCE: the loss is -advantage * logprob, with no ratio.")
    positive_example_nll_weight: NonNegativeFloat = setting(
        0.0, "Weight of a negative log-likelihood term on tokens of rewarded answers (VAPO)."
    )

    @property
    def normalizer(self) -> str:
        return self.loss_normalizer or ("tokens" if self.token_level_loss else "sequences")

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from self._ratio_problems()
        yield from self._trust_region_problems()
        yield from self._truncation_problems()
        if self.kl_importance_weight is not None and self.use_on_policy_kl_approximation:
            yield "loss_fn.kl_importance_weight and use_on_policy_kl_approximation exclude each other: unset one"
        if self.loss_normalizer == "max_tokens" and self.max_response_tokens is None:
            yield "loss_fn.loss_normalizer = max_tokens needs loss_fn.max_response_tokens, e.g. that of max_new_tokens"
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            yield "loss_fn.use_kl_in_reward needs loss_fn.reference_policy_kl_penalty above 0: set one of them"

    def _ratio_problems(self) -> Iterator[str]:
        if self.sequence_level_importance_ratios and self.normalizer != "sequences":
            yield "loss_fn.sequence_level_importance_ratios (GSPO) needs loss_fn.token_level_loss=false"
        if self.sequence_ratio_type == "product" and not self.sequence_level_importance_ratios:
            yield "loss_fn.sequence_ratio_type = product needs loss_fn.sequence_level_importance_ratios = true"
        if self.ratio_ceiling is not None and (self.use_cispo or self.disable_ppo_ratio):
            other = "use_cispo" if self.use_cispo else "disable_ppo_ratio"
            yield f"loss_fn.ratio_ceiling bounds the ratio of the clipped loss; loss_fn.{other} has none: unset one"
        if not self.use_cispo:
            return
        for name in ("sequence_level_importance_ratios", "disable_ppo_ratio", "force_on_policy_ratio", "ratio_clip_c"):
            if getattr(self, name) not in (False, None):
                yield f"loss_fn.use_cispo and loss_fn.{name} exclude each other, as CISPO has its own ratio: unset one"
        if self.normalizer == "sequences":
            yield "loss_fn.use_cispo needs loss_fn.token_level_loss = true: CISPO averages over tokens"

    def _trust_region_problems(self) -> Iterator[str]:
        field = f"loss_fn.trust_region = {self.trust_region}"
        if self.trust_region == "clip":
            return
        for name in ("use_cispo", "disable_ppo_ratio", "sequence_level_importance_ratios", "ratio_clip_c"):
            if getattr(self, name) not in (False, None):
                yield f"{field} and loss_fn.{name} exclude each other, each bounds the update in its way: unset one"
        if self.ratio_ceiling is not None and self.trust_region in ("soft", "geometric_mean"):
            yield f"{field} and loss_fn.ratio_ceiling exclude each other: its ratio is bounded already; unset one"
        if self.trust_region == "geometric_mean" and self.normalizer != "sequences":
            yield f"{field} needs loss_fn.token_level_loss = false: an answer has one ratio"

    def _truncation_problems(self) -> Iterator[str]:
        kind = self.truncated_importance_sampling_type
        if kind is None:
            return
        prefix = "loss_fn.truncated_importance_sampling"
        field, upper = f"{prefix}_type = {kind}", self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if not self.use_importance_sampling_correction:
            yield f"{field} needs loss_fn.use_importance_sampling_correction = true: else there is nothing to truncate"
        if upper is None:
            yield f"{field} needs {prefix}_ratio, the upper bound, e.g. 2.0"
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            yield f"{field} needs {prefix}_ratio_min, the lower bound, e.g. 0.5"
        if upper is not None and lower is not None and lower >= upper:
            yield f"{prefix}_ratio_min = {lower:g} must be below {prefix}_ratio = {upper:g}"
