"""The configs of `rm` and `sft`, and the one registration of all kinds of run in the config layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from posttrain.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from posttrain.config.dpo import DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.grpo_run import GrpoRunConfig
from posttrain.config.run_config import StepSizes, SupervisedRunConfig


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


class RmRunConfig(SupervisedRunConfig):
    kind: ClassVar[str] = "rm"
    rm: RmConfig = Field(description="The loss of a reward model, and validation.")

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size, 2, 2)

    def scoring_layer_problems(self) -> Iterator[str]:
        if not self.scores_answers:
            yield (
                "policy.reward_model_cfg.enabled = false: `posttrain rm` trains a reward model and nothing else; "
                "leave it true"
            )


class SftConfig(Section):
    max_num_epochs: PositiveInt = Field(default=1, description="Passes over the examples after which the run ends.")
    max_num_steps: PositiveInt = Field(default=60, description="Optimizer steps after which the run ends.")
    val_period: int = Field(
        default=10, description="Steps between validations; 0 or less turns periodic validation off."
    )
    val_batches: int = Field(default=8, description="Batches used by a validation; 0 or less uses the whole set.")
    val_global_batch_size: PositiveInt = Field(default=32, description="Examples in one validation batch.")
    val_at_start: bool = Field(default=True, description="Validates a fresh run before its first step.")
    val_at_end: bool = Field(default=False, description="Validates after the last step.")
    seed: NonNegativeInt = Field(default=42, description="Seed of data order and initialisation.")
    only_unmask_final: bool = Field(
        default=False, description="Trains only the last answer of a conversation, not all answers."
    )


class SftRunConfig(SupervisedRunConfig):
    kind: ClassVar[str] = "sft"
    sft: SftConfig = Field(description="Length of the run, and validation.")


Kind = Literal["grpo", "dpo", "rm", "sft", "eval"]
KINDS: tuple[Kind, ...] = ("grpo", "dpo", "rm", "sft")  # those that train
SUPERVISED_KINDS: tuple[Kind, ...] = ("dpo", "rm", "sft")  # those that sample nothing
PAIR_KINDS: tuple[Kind, ...] = ("dpo", "rm")  # those whose rows are pairs of answers
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "eval")

RUN_CONFIGS: dict[Kind, type[Section]] = {
    "grpo": GrpoRunConfig,
    "dpo": DpoRunConfig,
    "rm": RmRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}
