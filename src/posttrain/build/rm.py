"""A reward model's training from its config."""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.rm import RewardModelTraining
from posttrain.build.datasets import first_rows, options
from posttrain.config import RmRunConfig
from posttrain.data.sampler import Stream
from posttrain.policy.objectives import BradleyTerry
from posttrain.roles import Trainer


def build_rm(config: RmRunConfig, stream: Stream, validation: Any, policy: Trainer) -> RewardModelTraining:
    rm = config.rm
    return RewardModelTraining(
        config.policy.train_global_batch_size,
        BradleyTerry(**options(rm, BradleyTerry)),
        policy,
        stream,
        first_rows(validation, rm.val_batches * rm.val_global_batch_size),
    )
