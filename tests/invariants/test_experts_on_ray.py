"""Whole runs of a mixture of experts over Ray actors that share its experts: the curves of one process, with engines of
their own too, and a checkpoint of one continues on the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import LORA, assert_same_curves, copy_until, grpo, run, save_expert_model

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

STEPS = 4
LOCAL = ["cluster.launcher=local"]
SHARED = ["cluster.launcher=ray", "policy.dtensor_cfg.expert_parallel_size=2"]
ON_TWO = [*SHARED, "cluster.gpus_per_node=2"]
DEDICATED = [
    *SHARED,
    "cluster.gpus_per_node=3",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
]
# Ranks round sums otherwise; a small rate keeps that from choosing other tokens.
SETTINGS = ["grpo.max_val_samples=1", "policy.optimizer.kwargs.lr=1e-3"]

pytestmark = [pytest.mark.ray, pytest.mark.full]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_expert_model(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_ranks_that_share_experts_have_the_curves_of_one_process(
    adapters: list[str], experts: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(experts, data, tmp_path / name, steps=STEPS), *SETTINGS, *adapters]

    assert run([*arguments("alone"), *LOCAL]) == 0
    assert run([*arguments("shared"), *ON_TWO]) == 0
    assert_same_curves(tmp_path / "shared", tmp_path / "alone")
    copy_until(2, tmp_path / "shared", tmp_path / "resumed")
    assert run([*arguments("resumed"), *LOCAL]) == 0
    assert_same_curves(tmp_path / "resumed", tmp_path / "alone")


def test_an_engine_of_its_own_gets_the_experts_of_all_ranks(experts: Path, data: Path, tmp_path: Path) -> None:
    for name, where in (("alone", LOCAL), ("dedicated", DEDICATED)):
        assert run([*grpo(experts, data, tmp_path / name, steps=2), *SETTINGS, *where]) == 0
    assert_same_curves(tmp_path / "dedicated", tmp_path / "alone")
