"""What the config of every kind of run has. The kinds are in `grpo.py`, `dpo.py`, `evaluation.py` and `runs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from posttrain.config.base import NonNegativeInt, Section
from posttrain.config.checkpointing import CheckpointingConfig
from posttrain.config.data import DataConfig, EnvironmentConfig
from posttrain.config.logger_and_cluster import ClusterConfig, LoggerConfig
from posttrain.config.policy import PolicyConfig


class DoctorConfig(Section):
    on_error: Literal["warn", "stop"] = Field(
        default="warn",
        description="What an error of the doctor does: a line on the console, or the run saves and stops.",
    )
    kl_period: NonNegativeInt | Literal["auto"] = Field(
        default="auto",
        description="GRPO without KL penalty: steps between estimates of the KL; 0 is never, auto 10 with LoRA and 0 without.",
    )


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

    kind: ClassVar[str]

    preset: str | None = Field(
        default=None, description="Settings of another system to start from; `posttrain config presets` lists them."
    )
    policy: PolicyConfig = Field(description="The model that is trained.")
    data: DataConfig = Field(description="What it is trained on.")
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict, description="Judges of answers, by name.")
    checkpointing: CheckpointingConfig = Field(description="What is saved, and when.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Where metrics go.")
    doctor: DoctorConfig = Field(default_factory=DoctorConfig, description="Problems found while the run goes on.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Machines.")

    @property
    def num_engines(self) -> int:
        """On GPUs that only sample. 0: those that train sample too."""
        return self.num_engine_gpus // self.gpus_per_engine

    @property
    def gpus_per_engine(self) -> int:
        """That share the layers of an engine which only samples."""
        generation = self.policy.generation
        if generation is None or generation.colocated.enabled:
            return 1
        return generation.vllm_cfg.tensor_parallel_size

    @property
    def vllm_spans_gpus(self) -> bool:
        """Each engine which only samples is a vLLM that splits its layers itself."""
        return self.gpus_per_engine > 1 and self.policy.generation is not None and self.policy.generation.uses_vllm

    @property
    def num_engine_gpus(self) -> int:
        """GPUs that only sample: the last of all that the cluster has."""
        generation, cluster = self.policy.generation, self.cluster
        if generation is None or generation.colocated.enabled:
            return 0
        resources = generation.colocated.resources
        if cluster.num_nodes == 1:
            return resources.gpus_per_node or 0
        return (resources.num_nodes or 0) * cluster.gpus_per_node

    @property
    def num_ranks(self) -> int:
        """GPUs that train."""
        return self.cluster.num_workers - self.num_engine_gpus

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

    def scoring_layer_problems(self) -> Iterator[str]:
        if self.scores_answers:
            yield "policy.reward_model_cfg.enabled = true trains a reward model: that is `posttrain rm`; here it must be false"
