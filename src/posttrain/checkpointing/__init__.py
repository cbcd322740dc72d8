"""Checkpoints: folders that are either complete or not there, and what a run needs to resume from one.

Importing this package does not import torch; `state` and `saver` do.
"""

from posttrain.checkpointing.background import BackgroundWrite
from posttrain.checkpointing.compatibility import check_same_model, describe_model
from posttrain.checkpointing.stopping import Interruption, SaveDeadline
from posttrain.checkpointing.store import CheckpointStore
from posttrain.errors import CheckpointError

__all__ = [
    "BackgroundWrite",
    "CheckpointError",
    "CheckpointStore",
    "Interruption",
    "SaveDeadline",
    "check_same_model",
    "describe_model",
]
