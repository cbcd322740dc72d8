"""`checkpointing`: what is saved, when, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from posttrain.config.base import PositiveInt, Section, matching, setting

Metric = Annotated[
    str, matching(r"(val|train):\S+", "must be `val:` or `train:` followed by a metric, e.g. val:accuracy, or null")
]
Duration = Annotated[
    str, matching(r"\d+:[0-2]?\d:[0-5]?\d:[0-5]?\d", "must be days:hours:minutes:seconds, e.g. 00:03:45:00")
]


class CheckpointingConfig(Section):
    enabled: bool = setting(True, "Saves checkpoints; resuming from ones that exist does not depend on it.")
    checkpoint_dir: str = setting(
        ..., "Folder of the checkpoints; also the run folder unless logger.log_dir is set.", min_length=1
    )
    metric_name: Metric | None = setting(
        None, "Metric that ranks checkpoints, `val:` or `train:` and a name; null ranks by age."
    )
    higher_is_better: bool = setting(True, "Whether larger values of the metric are better.")
    keep_top_k: PositiveInt | None = setting(
        3, "Checkpoints to keep, best first; the latest is always kept; null keeps all."
    )
    save_period: PositiveInt = setting(10, "Steps between checkpoints.")
    checkpoint_must_save_by: Duration | None = setting(
        None, "Time after which the run saves and ends, as days:hours:minutes:seconds; null is never."
    )
    save_consolidated: bool | Literal["auto"] = setting(
        "auto",
        "Adds to each checkpoint a converted and verified model, LoRA merged: step_N/hf; auto does where it costs at "
        "most 2 % of the time.",
    )
    save_optimizer: bool = setting(True, "Saves the optimizer too; without it a run cannot be continued exactly.")
    async_save: bool | Literal["auto"] = setting(
        "auto", "Writes checkpoints in the background from a copy in CPU memory; auto does on a GPU, where that fits."
    )

    @property
    def must_save_by_s(self) -> float | None:
        """The deadline in seconds from the start of training."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
