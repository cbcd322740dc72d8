"""`logger`, `cluster` and the sections around them: where a run writes, and which machines it uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import NonNegativeInt, OpenSection, PositiveFloat, PositiveInt, Section


class WandbConfig(OpenSection):
    """Other keys, such as tags and group, are arguments of `wandb.init`."""

    project: str = Field(default="posttrain", min_length=1, description="Project of Weights & Biases.")
    name: str | None = Field(default=None, description="Name of the run there; null is the end of its folder's path.")
    entity: str | None = Field(default=None, description="User or team that owns the project; null is your default.")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="offline writes files for `wandb sync`; null is WANDB_MODE, or online."
    )


class MlflowConfig(Section):
    experiment_name: str = Field(default="posttrain", min_length=1, description="Experiment of MLflow.")
    run_name: str | None = Field(
        default=None, description="Name of the run there; null is the end of its folder's path."
    )
    tracking_uri: str | None = Field(
        default=None, description="Server, or sqlite:///file.db; null is MLFLOW_TRACKING_URI."
    )


class TrackioConfig(Section):
    project: str = Field(default="posttrain", min_length=1, description="Project of Trackio.")
    name: str | None = Field(default=None, description="Name of the run there; null is the end of its folder's path.")
    space_id: str | None = Field(default=None, description="Hugging Face Space to log to; null is the local database.")
    server_url: str | None = Field(default=None, description="Trackio server of your own; null is the local database.")


class SwanlabConfig(OpenSection):
    """Other keys, such as tags and workspace, are arguments of `swanlab.init`."""

    project: str = Field(default="posttrain", min_length=1, description="Project of SwanLab.")
    name: str | None = Field(default=None, description="Name of the run there; null is the end of its folder's path.")
    mode: Literal["online", "local", "offline"] | None = Field(
        default=None, description="local and offline write files only; null is SWANLAB_MODE, or online."
    )


class GpuMonitoringConfig(Section):
    collection_interval: PositiveFloat = Field(default=10.0, description="Seconds between two looks at the GPUs.")


class LoggerConfig(Section):
    log_dir: str | None = Field(
        default=None, description="Run folder: metrics, rollouts, report; null is checkpointing.checkpoint_dir."
    )
    token_data_period: NonNegativeInt = Field(
        default=10, description="GRPO: steps between files with the log-probabilities of tokens; 0 writes none."
    )
    token_data_groups: PositiveInt = Field(default=4, description="Groups of a step whose tokens are in such a file.")
    num_val_samples_to_print: NonNegativeInt = Field(default=0, description="Validation samples shown on the console.")
    num_rollouts_to_log: NonNegativeInt = Field(
        default=8, description="Answers of each step that trackers get as a table; 0 is none."
    )
    monitor_gpus: bool = Field(
        default=True, description="Adds utilisation, memory and power of this machine's GPUs to the metrics of a step."
    )
    gpu_monitoring: GpuMonitoringConfig = Field(
        default_factory=GpuMonitoringConfig, description="How often the GPUs are looked at."
    )
    tensorboard_enabled: bool = Field(default=False, description="Writes event files to loggers/tensorboard.")
    wandb_enabled: bool = Field(default=False, description="Logs to Weights & Biases.")
    mlflow_enabled: bool = Field(default=False, description="Logs to MLflow.")
    trackio_enabled: bool = Field(default=False, description="Logs to Trackio.")
    swanlab_enabled: bool = Field(default=False, description="Logs to SwanLab.")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="MLflow.")
    trackio: TrackioConfig = Field(default_factory=TrackioConfig, description="Trackio.")
    swanlab: SwanlabConfig = Field(default_factory=SwanlabConfig, description="SwanLab.")


class ClusterConfig(Section):
    num_nodes: PositiveInt = Field(default=1, description="Machines.")
    gpus_per_node: PositiveInt = Field(
        default=1, description="GPUs, or CPU workers where there are none, on each machine."
    )
    launcher: Literal["auto", "local", "ray"] = Field(
        default="auto", description="Who runs the workers: auto is one local process for one worker, else Ray."
    )
    max_restarts: NonNegativeInt = Field(
        default=0,
        description="Times that a run begins again from its newest checkpoint by itself, after it has lost a rank or "
        "a machine.",
    )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.gpus_per_node
