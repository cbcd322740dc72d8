"""`logger`, `cluster` and the sections around them: where a run writes, and which machines it uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import FreeMap, NonNegativeInt, OpenSection, Port, PositiveFloat, PositiveInt, Section


class GpuMonitoringConfig(Section):
    collection_interval: PositiveFloat = Field(default=10.0, description="Seconds between two readings of the GPUs.")
    flush_interval: PositiveFloat = Field(default=10.0, description="Seconds between two writes of the readings.")


class LoggerConfig(Section):
    log_dir: str | None = Field(
        default=None, description="Run folder: metrics, rollouts, report; null is checkpointing.checkpoint_dir."
    )
    num_val_samples_to_print: NonNegativeInt = Field(default=0, description="Validation samples shown on the console.")
    wandb_enabled: bool = Field(default=False, description="Sends metrics to Weights & Biases.")
    tensorboard_enabled: bool = Field(default=False, description="Writes metrics for TensorBoard.")
    mlflow_enabled: bool = Field(default=False, description="Sends metrics to MLflow.")
    swanlab_enabled: bool = Field(default=False, description="Sends metrics to SwanLab.")
    monitor_gpus: bool = Field(default=True, description="Records GPU utilisation and memory.")
    wandb: FreeMap = Field(default_factory=dict, description="Settings of Weights & Biases: project, name, entity.")
    tensorboard: FreeMap = Field(default_factory=dict, description="Settings of TensorBoard.")
    mlflow: FreeMap = Field(
        default_factory=dict, description="Settings of MLflow: experiment_name, run_name, tracking_uri."
    )
    swanlab: FreeMap = Field(default_factory=dict, description="Settings of SwanLab: project, name.")
    gpu_monitoring: GpuMonitoringConfig = Field(default_factory=GpuMonitoringConfig, description="How GPUs are read.")


class ClusterConfig(Section):
    num_nodes: PositiveInt = Field(default=1, description="Machines.")
    gpus_per_node: PositiveInt = Field(
        default=1, description="GPUs, or CPU workers where there are none, on each machine."
    )
    launcher: Literal["auto", "local", "ray"] = Field(
        default="auto", description="Who runs the workers: auto is one local process for one worker, else Ray."
    )
    master_port_range_low: Port = Field(default=1400, description="First port that workers may meet on.")
    master_port_range_high: Port = Field(default=1999, description="Last port that workers may meet on.")
    segment_size: PositiveInt | None = Field(
        default=None, description="Nodes in one NVLink domain; null does not care."
    )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.gpus_per_node


class DataPlaneConfig(OpenSection):
    enabled: bool = Field(default=False, description="Moves batches through NeMo's TransferQueue.")
    impl: str = Field(default="transfer_queue", description="Which implementation.")
    backend: str = Field(default="simple", description="Where it stores batches.")
    storage_capacity: PositiveInt = Field(default=1_000_000, description="Samples that it holds.")
    num_storage_units: PositiveInt = Field(default=2, description="Actors that hold them.")
    claim_meta_poll_interval_s: PositiveFloat = Field(
        default=0.5, description="Seconds between two looks for new samples."
    )
    global_segment_size: PositiveInt = Field(default=549_755_813_888, description="Bytes of shared memory.")
    local_buffer_size: PositiveInt = Field(default=68_719_476_736, description="Bytes of each local buffer.")


class PenaltyTokenIds(Section):
    unwanted: list[int] | None = Field(default=None, description="Token ids that must not appear in an answer.")
    think_open: int | None = Field(default=None, description="Token id that opens thinking.")
    think_close: int | None = Field(default=None, description="Token id that closes thinking.")


class RewardPenaltiesConfig(Section):
    penalize_duplicated_reasoning: bool = Field(default=False, description="Zeroes the reward of repeated reasoning.")
    penalize_empty_final_answer: bool = Field(default=False, description="Zeroes the reward of an empty answer.")
    penalize_unwanted_tokens: bool = Field(
        default=False, description="Zeroes the reward of answers with unwanted tokens."
    )
    penalize_malformed_think_tag: bool = Field(
        default=False, description="Zeroes the reward of malformed thinking tags."
    )
    token_ids: PenaltyTokenIds | None = Field(default=None, description="The token ids that these look for.")
