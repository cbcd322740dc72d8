"""Preference optimisation from its config: which loss, which rows, and whether there is a reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.algorithms.dpo import Dpo
from posttrain.algorithms.kto import Kto
from posttrain.build.datasets import first_rows, options
from posttrain.config import DpoRunConfig
from posttrain.config.preference_losses import LOSSES
from posttrain.data.sampler import Stream
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.policy.reference_cache import CachedReference
from posttrain.roles import Trainer


def needs_reference(config: DpoRunConfig) -> bool:
    return LOSSES[config.dpo.preference_loss].needs_reference


def is_paired(config: DpoRunConfig) -> bool:
    """Whether rows are pairs, so that batch sizes count pairs; otherwise single answers."""
    return LOSSES[config.dpo.preference_loss].is_paired


def build_preference(
    config: DpoRunConfig, stream: Stream[Any], validation: Any, policy: Trainer, warn: Callable[[str], None]
) -> Dpo | Kto:
    dpo, size = config.dpo, config.policy.train_global_batch_size
    held_out = first_rows(validation, dpo.val_batches * dpo.val_global_batch_size)
    checkpointing = config.checkpointing
    reference = CachedReference(
        policy,
        int(dpo.reference_cache_gib * 2**30),
        # It is needed to resume exactly, so it lies where the checkpoints are; without checkpoints nobody resumes.
        Path(checkpointing.checkpoint_dir) if checkpointing.enabled else None,
        warn,
    )
    if not is_paired(config):
        length = config.policy.max_total_sequence_length
        return Kto(size, length, KtoLoss(**options(dpo, KtoLoss)), policy, stream, reference, held_out)
    objective = PreferenceLoss(**options(dpo, PreferenceLoss))
    return Dpo(size, objective, policy, stream, held_out, reference if objective.needs_reference else None)
