"""Checkpoints: folders that are either complete or not there, and what a run needs to go on from one.

Importing this package does not import torch; `state` does.
"""

from posttrain.checkpointing.background import BackgroundWrite
from posttrain.checkpointing.compatibility import check_same_model, describe_model
from posttrain.checkpointing.deadline import SaveDeadline
from posttrain.checkpointing.errors import CheckpointError
from posttrain.checkpointing.interruption import Interruption
from posttrain.checkpointing.store import CheckpointStore

__all__ = [
    "BackgroundWrite",
    "CheckpointError",
    "CheckpointStore",
    "Interruption",
    "SaveDeadline",
    "check_same_model",
    "describe_model",
]
