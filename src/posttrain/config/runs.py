"""The whole config of a run: which sections each kind of run has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from posttrain.config.algorithms import DpoConfig, GrpoConfig, RmConfig, SftConfig
from posttrain.config.base import Section
from posttrain.config.checkpointing import CheckpointingConfig
from posttrain.config.data import DataConfig, EnvironmentConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.logger_and_cluster import ClusterConfig, LoggerConfig
from posttrain.config.loss import LossFnConfig
from posttrain.config.policy import GrpoPolicyConfig, PolicyConfig
from posttrain.config.preference_losses import LOSSES, LossTraits

Kind = Literal["grpo", "dpo", "rm", "sft", "eval"]
KINDS: tuple[Kind, ...] = ("grpo", "dpo", "rm", "sft")  # those that train
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "eval")


class Schedule(Protocol):
    """What the section of every algorithm has: how long a run goes on, and when it validates."""

    @property
    def seed(self) -> int: ...
    @property
    def max_num_steps(self) -> int: ...
    @property
    def max_num_epochs(self) -> int: ...
    @property
    def val_period(self) -> int: ...
    @property
    def val_at_start(self) -> bool: ...
    @property
    def val_at_end(self) -> bool: ...


@dataclass(frozen=True)
class StepSizes:
    """What one step of a run takes. A row of the data is a prompt, a pair, a labelled answer or an example."""

    num_rows: int
    num_answers_per_row: int = 1
    num_answers_per_unit: int = 1  # 2 where batch sizes of the config count pairs
    num_sampled_per_row: int = 0  # of the answers, those that the model gives in this step
    num_updates: int = 1
    num_scorings: int = 0  # passes over all answers without gradients: by the reference, by the policy
    caches_reference: bool = False  # from the second epoch on
    may_sample_again: bool = False  # until enough groups have a signal
    max_turns: int = 1


class RunConfig(Section):
    """What every run has."""

    kind: ClassVar[Kind]

    preset: str | None = Field(
        default=None, description="Settings of another system to start from; `posttrain config presets` lists them."
    )
    policy: PolicyConfig = Field(description="The model that is trained.")
    data: DataConfig = Field(description="What it is trained on.")
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict, description="Judges of answers, by name.")
    checkpointing: CheckpointingConfig = Field(description="What is saved, and when.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Where metrics go.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Machines.")

    @property
    def schedule(self) -> Schedule:
        """The algorithm's own section."""
        section: Schedule = getattr(self, self.kind)
        return section

    @property
    def scores_answers(self) -> bool:
        """Whether a scoring layer is trained: a number per answer in place of log-probabilities per token."""
        return self.policy.reward_model_cfg.enabled

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the starting policy is kept."""
        return False

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size)


class GrpoRunConfig(RunConfig):
    kind: ClassVar[Kind] = "grpo"
    grpo: GrpoConfig = Field(description="Sampling, advantages, validation.")
    loss_fn: LossFnConfig = Field(description="The clipped policy-gradient loss.")
    policy: GrpoPolicyConfig = Field(description="The model that is trained and sampled from.")

    @property
    def uses_recorded_answers(self) -> bool:
        return any(entry.holds_recorded_groups for entry in self.data.train_sets())

    @property
    def needs_reference(self) -> bool:
        """For a KL penalty. Recorded answers come without a behaviour policy: the starting policy stands in for it."""
        return self.loss_fn.reference_policy_kl_penalty != 0 or self.uses_recorded_answers

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
            num_scorings=int(self.needs_reference) + int(num_updates > 1 or checks_policy),
            may_sample_again=grpo.use_dynamic_sampling,
            max_turns=grpo.max_rollout_turns,
        )


class DpoRunConfig(RunConfig):
    kind: ClassVar[Kind] = "dpo"
    dpo: DpoConfig = Field(description="The preference loss, and validation.")

    @property
    def loss_traits(self) -> LossTraits:
        return LOSSES[self.dpo.preference_loss]

    @property
    def needs_reference(self) -> bool:
        return self.loss_traits.needs_reference

    def step_sizes(self) -> StepSizes:
        rows, needs_reference = self.policy.train_global_batch_size, self.needs_reference
        if self.loss_traits.is_paired:
            return StepSizes(rows, 2, 2, num_scorings=int(needs_reference), caches_reference=True)
        # Answers beside other prompts as well, under the reference and under the policy.
        return StepSizes(rows, num_scorings=int(needs_reference) + 2, caches_reference=True)


class RmRunConfig(RunConfig):
    kind: ClassVar[Kind] = "rm"
    rm: RmConfig = Field(description="The loss of a reward model, and validation.")

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size, 2, 2)


class SftRunConfig(RunConfig):
    kind: ClassVar[Kind] = "sft"
    sft: SftConfig = Field(description="Length of the run, and validation.")


RUN_CONFIGS: dict[Kind, type[Section]] = {
    "grpo": GrpoRunConfig,
    "dpo": DpoRunConfig,
    "rm": RmRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}
