"""`dpo`: the preference loss, and validation; and the whole config of such a run."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from posttrain.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from posttrain.config.preference_losses import LOSSES, LossTraits, PreferenceLossName
from posttrain.config.run_config import RunConfig, StepSizes


class DpoConfig(Section):
    max_num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs after which the run ends.")
    max_num_steps: PositiveInt = Field(default=150, description="Optimizer steps after which the run ends.")
    val_period: int = Field(
        default=25, description="Steps between validations; 0 or less turns periodic validation off."
    )
    val_batches: int = Field(default=8, description="Batches used by a validation; 0 or less uses the whole set.")
    val_global_batch_size: PositiveInt = Field(default=8, description="Pairs in one validation batch.")
    val_at_start: bool = Field(default=True, description="Validates a fresh run before its first step.")
    val_at_end: bool = Field(default=False, description="Validates after the last step.")
    seed: NonNegativeInt = Field(default=42, description="Seed of data order and initialisation.")
    preference_loss: PreferenceLossName = Field(
        default="dpo", description="The loss on preferences; kto learns from single answers, all others from pairs."
    )
    reference_policy_kl_penalty: Annotated[float, Field(gt=0)] = Field(
        default=0.05,
        description="Scale of the implicit reward (beta): larger keeps the policy closer to the reference.",
    )
    preference_average_log_probs: bool = Field(
        default=False, description="Implicit reward is the mean over tokens instead of the sum."
    )
    gt_reward_scale: PositiveFloat = Field(
        default=1.0, description="rpo_*: factor on chosen_reward - rejected_reward, the margin to be learnt."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="cdpo, robust, simpo: share of pairs assumed to be labelled the wrong way round."
    )
    simpo_gamma: NonNegativeFloat = Field(
        default=0.5, description="simpo: margin by which beta times the chosen reward should lead."
    )
    desirable_weight: NonNegativeFloat = Field(default=1.0, description="kto: factor on the loss of desirable answers.")
    undesirable_weight: NonNegativeFloat = Field(
        default=1.0, description="kto: factor on the loss of undesirable answers."
    )
    sft_average_log_probs: bool = Field(
        default=False, description="SFT term averages over the tokens of each chosen answer."
    )
    sft_token_level_loss: bool = Field(
        default=False, description="SFT term is a mean over all chosen tokens of the batch instead of over answers."
    )
    preference_loss_weight: NonNegativeFloat = Field(default=1.0, description="Weight of the preference loss.")
    sft_loss_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of the negative log-likelihood of the chosen answers; 0 does not compute it."
    )
    reference_cache_gib: NonNegativeFloat = Field(
        default=4.0,
        description="GiB of reference log-probabilities kept in memory and beside the checkpoints; 0 scores every time.",
    )


class DpoRunConfig(RunConfig):
    kind: ClassVar[str] = "dpo"
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
