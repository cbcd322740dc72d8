"""`logger`, `cluster` and the sections around them: where a run writes, and which machines it uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import NonNegativeInt, PositiveInt, Section


class LoggerConfig(Section):
    log_dir: str | None = Field(
        default=None, description="Run folder: metrics, rollouts, report; null is checkpointing.checkpoint_dir."
    )
    num_val_samples_to_print: NonNegativeInt = Field(default=0, description="Validation samples shown on the console.")


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
        description="Times that a run begins again from its newest checkpoint by itself, after it has lost a rank or a machine.",
    )

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.gpus_per_node
