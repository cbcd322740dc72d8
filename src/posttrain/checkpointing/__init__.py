"""Checkpoints: folders that are either complete or not there, and what a run needs to resume from one.

Importing this package does not import torch; `state` and `save_and_resume` do.
"""

from posttrain.checkpointing.background import CHECKPOINT_THREAD, BackgroundWrite
from posttrain.checkpointing.compatibility import check_same_model, describe_model
from posttrain.checkpointing.stopping import Interruption, SaveDeadline, StopAtOnce
from posttrain.checkpointing.store import CheckpointStore
from posttrain.errors import CheckpointError

__all__ = [
    "CHECKPOINT_THREAD",
    "BackgroundWrite",
    "CheckpointError",
    "CheckpointStore",
    "Interruption",
    "SaveDeadline",
    "StopAtOnce",
    "check_same_model",
    "describe_model",
]
