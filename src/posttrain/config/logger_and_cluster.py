"""`logger`, `cluster` and the sections around them: where a run writes, and which machines it uses."""

from __future__ import annotations

from typing import Literal

from posttrain.config.base import NonNegativeInt, OpenSection, PositiveFloat, PositiveInt, Section, setting


class WandbConfig(OpenSection):
    """Other keys, such as tags and group, are arguments of `wandb.init`."""

    project: str = setting("posttrain", "Project of Weights & Biases.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    entity: str | None = setting(None, "User or team that owns the project; null is your default.")
    mode: Literal["online", "offline"] | None = setting(
        None, "offline writes files for `wandb sync`; null is WANDB_MODE, or online."
    )


class MlflowConfig(Section):
    experiment_name: str = setting("posttrain", "Experiment of MLflow.", min_length=1)
    run_name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    tracking_uri: str | None = setting(None, "Server, or sqlite:///file.db; null is MLFLOW_TRACKING_URI.")


class TrackioConfig(Section):
    project: str = setting("posttrain", "Project of Trackio.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    space_id: str | None = setting(None, "Hugging Face Space to log to; null is the local database.")
    server_url: str | None = setting(None, "Trackio server of your own; null is the local database.")


class SwanlabConfig(OpenSection):
    """Other keys, such as tags and workspace, are arguments of `swanlab.init`."""

    project: str = setting("posttrain", "Project of SwanLab.", min_length=1)
    name: str | None = setting(None, "Name of the run there; null is the end of its folder's path.")
    mode: Literal["online", "local", "offline"] | None = setting(
        None, "local and offline write files only; null is SWANLAB_MODE, or online."
    )


class GpuMonitoringConfig(Section):
    collection_interval: PositiveFloat = setting(10.0, "Seconds between two looks at the GPUs.")


class LoggerConfig(Section):
    log_dir: str | None = setting(None, "Run folder: metrics, rollouts, report; null is checkpointing.checkpoint_dir.")
    token_data_period: NonNegativeInt = setting(
        10, "GRPO: steps between files with the log-probabilities of tokens; 0 writes none."
    )
    token_data_groups: PositiveInt = setting(4, "Groups of a step whose tokens are in such a file.")
    num_val_samples_to_print: NonNegativeInt = setting(0, "Validation samples shown on the console.")
    num_rollouts_to_log: NonNegativeInt = setting(8, "Answers of each step that trackers get as a table; 0 is none.")
    monitor_gpus: bool = setting(
        True, "Adds utilisation, memory and power of this machine's GPUs to the metrics of a step."
    )
    gpu_monitoring: GpuMonitoringConfig = setting(GpuMonitoringConfig, "How often the GPUs are looked at.")
    tensorboard_enabled: bool = setting(False, "Writes event files to loggers/tensorboard.")
    wandb_enabled: bool = setting(False, "Logs to Weights & Biases.")
    mlflow_enabled: bool = setting(False, "Logs to MLflow.")
    trackio_enabled: bool = setting(False, "Logs to Trackio.")
    swanlab_enabled: bool = setting(False, "Logs to SwanLab.")
    wandb: WandbConfig = setting(WandbConfig, "Weights & Biases.")
    mlflow: MlflowConfig = setting(MlflowConfig, "MLflow.")
    trackio: TrackioConfig = setting(TrackioConfig, "Trackio.")
    swanlab: SwanlabConfig = setting(SwanlabConfig, "SwanLab.")


class ClusterConfig(Section):
    num_nodes: PositiveInt = setting(1, "Machines.")
    gpus_per_node: PositiveInt = setting(1, "GPUs, or CPU workers where there are none, on each machine.")
    launcher: Literal["auto", "local", "ray"] = setting(
        "auto", "Who runs the workers: auto is one local process for one worker, else Ray."
    )
    max_restarts: NonNegativeInt = setting(
        0, "Times that a run begins again from its newest checkpoint by itself, after it has lost a rank or a machine."
    )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.gpus_per_node
