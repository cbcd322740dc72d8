"""`grpo`: sampling, advantages, validation; and the whole config of a GRPO run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from posttrain.config.loss import LossFnConfig
from posttrain.config.policy import GrpoPolicyConfig
from posttrain.config.run_config import RunConfig, StepSizes

KL_PERIOD = 10  # steps


class RewardShapingConfig(Section):
    enabled: bool = Field(default=False, description="Changes rewards of answers that are long or cut off.")
    overlong_buffer_length: PositiveInt | None = Field(
        default=128, description="Tokens before max_response_length in which the length penalty grows."
    )
    overlong_buffer_penalty: NonNegativeFloat | None = Field(
        default=1.0, description="Reward subtracted at the end of the buffer zone."
    )
    max_response_length: PositiveInt | None = Field(
        default=None, description="Answer length in tokens at which the zone ends."
    )
    stop_properly_penalty_coef: Fraction | None = Field(
        default=None,
        description="Factor on rewards of answers that were cut off; when set, the length penalty is not used.",
    )


class RewardScalingConfig(Section):
    enabled: bool = Field(default=False, description="Maps rewards linearly from the source range to the target range.")
    source_min: float = Field(default=0.0, description="Lower end of the rewards that come in; lower ones are clamped.")
    source_max: float = Field(
        default=1.0, description="Upper end of the rewards that come in; higher ones are clamped."
    )
    target_min: float = Field(default=0.0, description="Reward that source_min becomes.")
    target_max: float = Field(default=1.0, description="Reward that source_max becomes.")


class AdvEstimatorConfig(Section):
    name: Literal["grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "gdpo", "opd"] = Field(
        default="grpo",
        description="How rewards become advantages: against the group, against all, or (gdpo) part by part.",
    )
    normalize_rewards: bool = Field(
        default=True, description="grpo, gdpo: divides the advantage by the standard deviation of its group."
    )
    use_leave_one_out_baseline: bool = Field(
        default=True,
        description="grpo, gdpo: the baseline is the mean of the other answers of the group, not of all of them.",
    )
    minus_baseline: bool = Field(default=True, description="reinforce_plus_plus: subtracts the group mean.")
    reward_weights: list[float] | None = Field(
        default=None, description="gdpo: weight of each reward part, in alphabetical order."
    )
    std_over: Literal["group", "batch"] = Field(
        default="group", description="grpo, gdpo: whose rewards the standard deviation is of."
    )
    std_ddof: Literal[0, 1] | None = Field(
        default=None,
        description="What is taken from the count in a variance; null is the estimator's own, 1 or (reinforce_plus_plus) 0.",
    )
    std_epsilon: NonNegativeFloat | None = Field(
        default=None,
        description="What keeps a divisor from 0; null is 1e-6, or 1e-8 (reinforce_plus_plus) and 0 (gdpo) for whitening.",
    )
    std_epsilon_form: Literal["std_plus", "variance_plus", "variance_floor"] | None = Field(
        default=None,
        description="Where it stands: std + e, sqrt(variance + e) or sqrt(max(variance, e)); null is the estimator's own.",
    )
    group_of_one: Literal["zero", "reward"] = Field(
        default="zero", description="Advantage of an answer that is the only scored one of its group."
    )
    whiten_advantages: Literal["none", "rollouts", "tokens"] | None = Field(
        default=None,
        description="Over what advantages get mean 0 and variance 1; null: reinforce_plus_plus tokens, gdpo rollouts, else none.",
    )
    kl_in_reward: Literal["sequence", "token", "return"] | None = Field(
        default=None,
        description="What loss_fn.use_kl_in_reward charges: the answer, each token, or all tokens before; null is its own.",
    )


class AsyncGrpoConfig(Section):
    enabled: bool = Field(
        default=False,
        description="Trains on the groups that are finished first; unfinished answers continue with the next step's weights.",
    )
    max_trajectory_age_steps: NonNegativeInt = Field(
        default=1,
        description="Steps that a group may be trained after the one that began it; 0 is synchronous.",
    )
    groups_in_flight: Annotated[float, Field(ge=1)] | None = Field(
        default=None,
        description="Groups that are sampled at once, in multiples of num_prompts_per_step; null is 1 + max age / 2, with "
        "engines on GPUs of their own (max age + 1) / 2.",
    )


class GrpoConfig(Section):
    num_prompts_per_step: PositiveInt = Field(default=32, description="Prompts sampled and trained in each step.")
    num_generations_per_prompt: PositiveInt = Field(
        default=16, description="Answers sampled for each prompt: the group size."
    )
    num_recorded_per_prompt: PositiveInt | None = Field(
        default=None,
        description="Of the answers of a prompt, those taken from labelled traces (TraceGroups); null is all, none fresh.",
    )
    max_rollout_turns: PositiveInt = Field(
        default=1, description="Turns that the model has in one rollout, where the environment has `turns`."
    )
    max_num_epochs: PositiveInt = Field(default=1, description="Passes over the prompts after which the run ends.")
    max_num_steps: PositiveInt = Field(
        default=1_000_000, description="Steps after which the run ends, if the epochs have not ended it."
    )
    normalize_rewards: bool = Field(
        default=True,
        description="Default of adv_estimator.normalize_rewards: divides by the group's standard deviation.",
    )
    use_leave_one_out_baseline: bool = Field(
        default=True,
        description="Default of adv_estimator.use_leave_one_out_baseline: the baseline leaves the answer itself out.",
    )
    val_period: int = Field(
        default=10, description="Steps between validations; 0 or less turns periodic validation off."
    )
    val_start_at: int = Field(
        default=-1, description="First step at which periodic validation may run; -1 is from the start."
    )
    val_at_start: bool = Field(default=False, description="Validates a fresh run before its first step.")
    val_at_end: bool = Field(default=False, description="Validates after the last step.")
    overlong_filtering: bool = Field(
        default=False,
        description="Leaves answers that hit the length limit out of the loss; they still count in the baseline.",
    )
    advantage_clip_low: float | None = Field(
        default=None, description="Lower bound of the advantages; null is unbounded."
    )
    advantage_clip_high: float | None = Field(
        default=None, description="Upper bound of the advantages; null is unbounded."
    )
    max_val_samples: PositiveInt | None = Field(
        default=256, description="Prompts used by a validation; null uses all of them."
    )
    val_num_generations_per_prompt: PositiveInt = Field(
        default=1, description="Answers per validation prompt; more than one also reports pass@k."
    )
    stop_at_validation_metric: str | None = Field(
        default=None, description="Validation metric that ends the run early, e.g. accuracy; needs the threshold."
    )
    stop_at_validation_threshold: float | None = Field(
        default=None, description="Value of stop_at_validation_metric at or above which the run saves and ends."
    )
    seed: NonNegativeInt = Field(default=42, description="Seed of data order, sampling noise and initialisation.")
    use_dynamic_sampling: bool = Field(
        default=False, description="Samples until enough groups have rewards that differ (DAPO)."
    )
    dynamic_sampling_max_gen_batches: PositiveInt = Field(
        default=10, description="Batches that dynamic sampling may generate for one step."
    )
    dynamic_sampling_surplus: Literal["keep", "discard"] = Field(
        default="keep", description="What becomes of groups beyond those that a step needs: the next step's, or lost."
    )
    batch_multiplier: PositiveFloat = Field(
        default=1.0,
        description="Prompts in one batch of dynamic sampling, as a multiple of num_prompts_per_step.",
    )
    seq_logprob_error_threshold: PositiveFloat | None = Field(
        default=None,
        description="Drops answers whose mean exp(|sampler - trainer logprob|) is above this; null keeps all.",
    )
    skip_reference_policy_logprobs_calculation: bool = Field(
        default=False,
        description="Does without the reference; needs loss_fn.reference_policy_kl_penalty 0, which implies it.",
    )
    reward_shaping: RewardShapingConfig = Field(
        default_factory=RewardShapingConfig, description="Penalties for long or cut-off answers."
    )
    reward_scaling: RewardScalingConfig = Field(
        default_factory=RewardScalingConfig, description="Linear map from one reward range to another."
    )
    async_grpo: AsyncGrpoConfig = Field(
        default_factory=AsyncGrpoConfig, description="Sampling that goes on from step to step."
    )
    adv_estimator: AdvEstimatorConfig = Field(
        default_factory=AdvEstimatorConfig, description="How rewards become advantages."
    )

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


class GrpoRunConfig(RunConfig):
    kind: ClassVar[str] = "grpo"
    grpo: GrpoConfig = Field(description="Sampling, advantages, validation.")
    loss_fn: LossFnConfig = Field(description="The clipped policy-gradient loss.")
    policy: GrpoPolicyConfig = Field(description="The model that is trained and sampled from.")

    @property
    def uses_recorded_answers(self) -> bool:
        return any(entry.holds_recorded_groups for entry in self.data.train_sets())

    @property
    def rounds_ahead(self) -> int:
        """1: the round of a step samples while the step before it trains; 0: when the step begins."""
        section = self.grpo.async_grpo
        return int(section.enabled and section.max_trajectory_age_steps > 0 and self.num_engines > 0)

    @property
    def num_groups_in_flight(self) -> int:
        """The mean age of what is trained is this number divided by the prompts of a step, minus 1, plus `rounds_ahead`."""
        section = self.grpo.async_grpo
        multiple = section.groups_in_flight
        if multiple is None:
            multiple = 1 + (section.max_trajectory_age_steps - self.rounds_ahead) / 2
        return int(multiple * self.grpo.num_prompts_per_step)

    @property
    def gpus_per_sampler(self) -> int:
        """That share the layers of what samples. A vLLM that shares the GPU of a rank has whole layers."""
        if self.num_engines or self.policy.generation.uses_vllm:
            return self.gpus_per_engine
        return self.policy.dtensor_cfg.tensor_parallel_size

    @property
    def num_samplers(self) -> int:
        """Which have equal shares of a round."""
        return self.num_engines or self.num_ranks // self.gpus_per_sampler

    @property
    def needs_reference(self) -> bool:
        """For a KL penalty, or to estimate the KL. Recorded answers come without a behaviour policy: the starting policy
        stands in for it."""
        return self._scores_with_reference or self.kl_period > 0

    @property
    def _scores_with_reference(self) -> bool:
        """In every step."""
        return self.loss_fn.reference_policy_kl_penalty != 0 or self.uses_recorded_answers

    @property
    def kl_period(self) -> int:
        """Steps between estimates of a KL that is not in the loss; 0: none. With adapters the starting policy is there anyway."""
        if self.loss_fn.reference_policy_kl_penalty != 0:
            return 0
        if self.doctor.kl_period != "auto":
            return self.doctor.kl_period
        return KL_PERIOD if self.policy.dtensor_cfg.lora_cfg.enabled else 0

    def step_sizes(self) -> StepSizes:
        grpo = self.grpo
        num_updates = grpo.num_samples_per_step // self.policy.train_global_batch_size
        checks_policy = grpo.seq_logprob_error_threshold is not None or self.loss_fn.use_kl_in_reward
        recorded = self.uses_recorded_answers
        return StepSizes(
            grpo.num_prompts_per_step,
            num_answers_per_row=grpo.num_generations_per_prompt,
            num_sampled_per_row=grpo.num_fresh_per_prompt if recorded else grpo.num_generations_per_prompt,
            num_updates=num_updates,
            num_scorings=int(self._scores_with_reference) + int(num_updates > 1 or checks_policy),
            may_sample_again=grpo.use_dynamic_sampling,
            max_turns=grpo.max_rollout_turns,
        )
