"""Runs on images do not depend on the number of ranks, nor on a kill; pictures travel with the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import (
    assert_same_curves,
    grpo,
    results_of,
    rows_of,
    run,
    save_image_data,
    start,
    wait_until,
    weights_of,
)
from tiny_vision import save_vision_model

STEPS = 3
SETTINGS = [
    "policy.max_total_sequence_length=128", "policy.logprob_batch_size=16", "policy.generation.max_new_tokens=6",
    "grpo.val_period=0", "checkpointing.metric_name=null", "checkpointing.save_period=1",
]  # fmt: skip
ON_TWO = ["cluster.launcher=ray", "cluster.gpus_per_node=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_data(tmp_path_factory.mktemp("data"))


@pytest.mark.ray
@pytest.mark.parametrize("trains_tower", [False, True], ids=["frozen tower", "trained tower"])
def test_two_ranks_train_as_one(model: Path, data: Path, tmp_path: Path, trains_tower: bool) -> None:
    tower = [f"policy.vision.train_tower={str(trains_tower).lower()}"]
    for name, where in (("one", ["cluster.launcher=local"]), ("two", ON_TWO)):
        assert run([*grpo(model, data, tmp_path / name, steps=STEPS), *SETTINGS, *tower, *where]) == 0
    assert len({row["train/loss"] for row in rows_of(tmp_path / "one")}) == STEPS
    assert_same_curves(tmp_path / "two", tmp_path / "one")


def test_a_killed_run_goes_on_with_the_same_bits(model: Path, data: Path, tmp_path: Path) -> None:
    """kill -9 after the first checkpoint."""

    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *SETTINGS]

    assert run(arguments("whole")) == 0
    process = start(arguments("killed"), tmp_path / "log")
    assert wait_until(lambda: (tmp_path / "killed" / "step_1").exists(), process)
    process.kill()
    process.join()
    assert run(arguments("killed")) == 0
    assert results_of(tmp_path / "killed") == results_of(tmp_path / "whole")
    assert weights_of(tmp_path / f"killed/step_{STEPS}") == weights_of(tmp_path / f"whole/step_{STEPS}")
