"""Engines on places of their own: what they sample, what is left of a run when they die, and how it resumes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_local_equals_ray import copy_until
from test_rounds_are_exact import trained_draws
from tiny_runs import LORA, grpo, results_of, rows_of, run, save_data, save_model, weights_of

ray = pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

STEPS = 6
LOCAL = ["cluster.launcher=local"]
DEDICATED = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
AGE_2 = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, address="local")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_data(tmp_path_factory.mktemp("data"))


def assert_same_run(folder: Path, expected: Path) -> None:
    assert results_of(folder) == results_of(expected)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(expected / f"step_{STEPS}")


@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_a_synchronous_run_has_the_bits_of_a_colocated_one(
    adapters: list[str], model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *adapters]

    assert run([*arguments("colocated"), *LOCAL]) == 0
    assert run([*arguments("dedicated"), *DEDICATED]) == 0
    assert_same_run(tmp_path / "dedicated", tmp_path / "colocated")


def test_a_run_that_samples_ahead_resumes_with_the_same_bits(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *DEDICATED, *AGE_2]

    assert run(arguments("whole")) == 0
    ages = [row["train/trajectory_age_max"] for row in results_of(tmp_path / "whole") if "train/loss" in row]
    assert ages[0] == 0
    assert min(ages[1:]) >= 1, "sampled while the step before was trained"
    assert max(ages) <= 2
    assert sorted(trained_draws(tmp_path / "whole", STEPS)) == list(range(STEPS * 4))
    copy_until(2, tmp_path / "whole", tmp_path / "resumed")
    assert run(arguments("resumed")) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
