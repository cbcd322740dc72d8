"""The driver's part of a checkpoint: where the data stream is, and the state of the process's random generators.

One file, `train_dataloader.pt`, that `torch.load(..., weights_only=True)` reads: plain values and tensors, no code.
Weights, optimizer and scheduler are the policy's part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.checkpointing.dcp_reading import load_plain
from posttrain.errors import CheckpointError
from posttrain.files.json_files import JsonObject

TRAINING_STATE = "train_dataloader.pt"
_FORMAT = 1


@dataclass(frozen=True)
class TrainingState:
    step: int  # steps that were finished when this was saved
    stream_state: dict[str, object]
    rng: JsonObject  # of `capture_rng`
    extra: dict[str, int]


def save_training_state(folder: Path, state: TrainingState) -> None:
    """Write `train_dataloader.pt` into a checkpoint's folder."""
    content = {"format": _FORMAT, **vars(state)}
    _require_plain(content, "training state")
    torch.save(content, folder / TRAINING_STATE)


def load_training_state(folder: Path) -> TrainingState:
    path = folder / TRAINING_STATE
    try:
        state = load_plain(path, "cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: this checkpoint cannot be resumed from") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} has format {found!r}; this version of posttrain reads format {_FORMAT}")
    return TrainingState(state["step"], state["stream_state"], state["rng"], state["extra"])


def capture_rng() -> JsonObject:
    """The state of the global generators of Python, numpy and torch, and of each CUDA device if CUDA is in use."""
    version, internal, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached_gaussian),
        },
        "torch": torch.get_rng_state(),
        # In a process that does not use CUDA this would create a context on every device.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the generators to the state of `capture_rng`. Devices that no longer exist are left out."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss_next"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


def _require_plain(value: object, name: str) -> None:
    """Fail while saving, with the name of the value, rather than while resuming."""
    if type(value) is dict:
        for key, item in value.items():
            _require_plain(key, f"a key of {name}")
            _require_plain(item, f"{name}.{key}")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{name}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str, bytes, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(value).__name__}; a checkpoint holds plain values, lists, dicts and tensors"
        )
