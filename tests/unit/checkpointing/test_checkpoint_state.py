"""The driver's state survives a checkpoint: data position and random generators."""

from __future__ import annotations

import pickle
import random
import traceback
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.checkpointing import CheckpointError
from posttrain.checkpointing.state import (
    TrainingState,
    capture_rng,
    load_training_state,
    restore_rng,
    save_training_state,
)


def draw() -> list[float]:
    """From every generator; normal draws leave a cached second value in those of Python and numpy."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


def test_generators_continue_after_a_save_and_a_load(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    save_training_state(tmp_path, TrainingState(5, {}, capture_rng(), {}))
    expected = [draw(), draw()]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert draw() != expected[0]
    restore_rng(load_training_state(tmp_path).rng)
    assert [draw(), draw()] == expected


def test_capturing_does_not_move_the_generators() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    capture_rng()
    assert draw() == expected


def test_restore_rng_ignores_states_of_absent_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(device))
    state = capture_rng()
    expected = draw()
    for available, count in ((False, 0), (True, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        restored.clear()
        restore_rng({**state, "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2})
        assert restored == list(range(count))
        assert draw() == expected, "the other generators are restored all the same"


def test_plain_state_comes_back_as_it_was(tmp_path: Path) -> None:
    stream = {"epoch": 2, "position": 17, "seed": 42, "order": [3, 1, 2], "nested": {"name": "gsm8k", "done": None}}
    extra = {"history": (1.5, True), "tensor": torch.arange(3), "raw": b"\x00\xff", 7: "int key"}
    save_training_state(tmp_path, TrainingState(5, stream, {}, extra))
    state = load_training_state(tmp_path)
    assert isinstance(state, TrainingState)
    assert (state.step, state.stream_state) == (5, stream)
    assert torch.equal(state.extra.pop("tensor"), torch.arange(3))
    assert state.extra == {"history": (1.5, True), "raw": b"\x00\xff", 7: "int key"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(np.float64(1), "float64"), (np.zeros(2), "ndarray"), (Path("x"), "PosixPath"), (defaultdict(int), "defaultdict")],
)
def test_what_could_not_be_loaded_again_is_refused_while_saving(tmp_path: Path, value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"training state\.stream_state\.reader\[1\] is a {kind}"):
        save_training_state(tmp_path, TrainingState(1, {"reader": [0, value]}, {}, {}))
    assert not (tmp_path / "train_dataloader.pt").exists()


def test_a_missing_torn_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt is missing"):
        load_training_state(tmp_path)
    path = tmp_path / "train_dataloader.pt"
    save_training_state(tmp_path, TrainingState(1, {}, capture_rng(), {}))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt cannot be read"):
        load_training_state(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt cannot be read"):
        load_training_state(tmp_path)
    torch.save({"position": 3}, path)
    with pytest.raises(CheckpointError, match="format None"):
        load_training_state(tmp_path)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("code ran",)

    path = tmp_path / "train_dataloader.pt"
    torch.save({"format": 1, "trap": Trap()}, path)
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt cannot be read: it names print") as raised:
        load_training_state(tmp_path)
    assert "weights_only" not in "".join(traceback.format_exception(raised.value)), "torch's advice runs the code"
    path.write_bytes(pickle.dumps({"trap": Trap()}))
    with pytest.raises(CheckpointError, match="plain values and tensors only; not loaded") as raised:
        load_training_state(tmp_path)
    assert "weights_only" not in str(raised.value)
    path.write_bytes(b"junk" * 10)  # torch raises a KeyError
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt cannot be read"):
        load_training_state(tmp_path)
