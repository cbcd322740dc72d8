"""`rm`: the loss of a reward model, and validation; and the whole config of such a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from posttrain.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from posttrain.config.run_config import RunConfig, StepSizes


class RmConfig(Section):
    max_num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs after which the run ends.")
    max_num_steps: PositiveInt = Field(
        default=1_000_000, description="Optimizer steps after which the run ends, if the epochs have not ended it."
    )
    val_period: int = Field(
        default=16, description="Steps between validations; 0 or less turns periodic validation off."
    )
    val_batches: int = Field(default=-1, description="Batches used by a validation; 0 or less uses the whole set.")
    val_global_batch_size: PositiveInt = Field(default=32, description="Pairs in one validation batch.")
    val_at_start: bool = Field(default=False, description="Validates a fresh run before its first step.")
    val_at_end: bool = Field(default=False, description="Validates after the last step.")
    seed: NonNegativeInt = Field(default=42, description="Seed of data order and of the scoring layer.")
    center_rewards_coefficient: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the squared sum of a pair's scores, which keeps scores around 0; 0 does not compute it.",
    )
    margin_from_rewards: bool = Field(
        default=False,
        description="Asks for a difference of scores larger than that of the pair's chosen_reward and rejected_reward.",
    )


class RmRunConfig(RunConfig):
    kind: ClassVar[str] = "rm"
    rm: RmConfig = Field(description="The loss of a reward model, and validation.")

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size, 2, 2)

    def scoring_layer_problems(self) -> Iterator[str]:
        if not self.scores_answers:
            yield "policy.reward_model_cfg.enabled = false: `posttrain rm` trains a reward model and nothing else; leave it true"
