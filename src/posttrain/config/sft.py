"""`sft`: length of the run, and validation; and the whole config of such a run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from posttrain.config.base import NonNegativeInt, PositiveInt, Section
from posttrain.config.run_config import RunConfig


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


class SftRunConfig(RunConfig):
    kind: ClassVar[str] = "sft"
    sft: SftConfig = Field(description="Length of the run, and validation.")
