"""What the benchmarks' TRL sides share: a stopwatch, and settings that leave everything else to TRL."""

from __future__ import annotations

import time
from typing import Any

import torch
from machine import synchronise
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Seconds, loss and norm of the gradient of every step."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronise()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronise()
        self.step_s.append(time.perf_counter() - self.start)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.grad_norms.append(float(logs["grad_norm"]))


def trainer_settings(folder: str, device: str, dtype: torch.dtype, *, checkpointing: bool) -> dict[str, Any]:
    """One constant small learning rate, nothing saved, nothing reported but losses."""
    return {
        "output_dir": folder,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "bf16": dtype is torch.bfloat16,
        "use_cpu": device == "cpu",
        "gradient_checkpointing": checkpointing,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
