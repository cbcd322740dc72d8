"""The whole config of a run: which sections each kind of run has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.algorithms import DpoConfig, GrpoConfig, RmConfig, SftConfig
from posttrain.config.base import FreeMap, Section
from posttrain.config.checkpointing import CheckpointingConfig
from posttrain.config.data import DataConfig, EnvironmentConfig, SftDataConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.logger_and_cluster import ClusterConfig, DataPlaneConfig, LoggerConfig, RewardPenaltiesConfig
from posttrain.config.loss import LossFnConfig
from posttrain.config.policy import GrpoPolicyConfig, PolicyConfig

Kind = Literal["grpo", "dpo", "rm", "sft", "eval"]
KINDS: tuple[Kind, ...] = ("grpo", "dpo", "rm", "sft")  # those that train
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "eval")


class RunConfig(Section):
    """What every run has."""

    preset: str | None = Field(
        default=None, description="Settings of another system to start from; `posttrain config presets` lists them."
    )
    policy: PolicyConfig = Field(description="The model that is trained.")
    data: DataConfig = Field(description="What it is trained on.")
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict, description="Judges of answers, by name.")
    checkpointing: CheckpointingConfig = Field(description="What is saved, and when.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Where metrics go.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Machines.")


class GrpoRunConfig(RunConfig):
    grpo: GrpoConfig = Field(description="Sampling, advantages, validation.")
    loss_fn: LossFnConfig = Field(description="The clipped policy-gradient loss.")
    policy: GrpoPolicyConfig = Field(description="The model that is trained and sampled from.")
    reward_penalties: RewardPenaltiesConfig = Field(
        default_factory=RewardPenaltiesConfig, description="Answers whose reward NeMo Gym zeroes."
    )
    data_plane: DataPlaneConfig = Field(default_factory=DataPlaneConfig, description="NeMo's transport of batches.")
    on_policy_distillation: FreeMap | None = Field(default=None, description="Distillation from teachers; null is off.")
    async_rl: FreeMap | None = Field(default=None, description="NeMo's single-controller mode; null is off.")


class DpoRunConfig(RunConfig):
    dpo: DpoConfig = Field(description="The preference loss, and validation.")


class RmRunConfig(RunConfig):
    rm: RmConfig = Field(description="The loss of a reward model, and validation.")


class SftRunConfig(RunConfig):
    sft: SftConfig = Field(description="Length of the run, and validation.")
    data: SftDataConfig = Field(description="What it is trained on.")


RUN_CONFIGS: dict[Kind, type[Section]] = {
    "grpo": GrpoRunConfig,
    "dpo": DpoRunConfig,
    "rm": RmRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}
