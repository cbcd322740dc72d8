"""Answers whose share of the gradient is 0 are not computed, and nothing but metrics that are means over tokens can
tell.

Loss, every gradient, weights and optimizer state equal those of updates that compute all rows. Metrics are means over
the rows that are computed, so they do not depend on packing, micro-batches and the number of ranks either.
`rows_without_gradient.py` has the cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import TOLERANCE, approx
from rows_without_gradient import ALL_ROWS, CASES, PACKINGS
from torch import Tensor

PROGRAM = Path(__file__).parents[1] / "rows_without_gradient.py"
Outcomes = Mapping[tuple[str, str], Mapping[str, Any]]


def outcomes(folder: Path, world: int) -> Outcomes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parent), *sys.path])
    command = [sys.executable, str(PROGRAM), str(folder), str(world)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found: Outcomes = torch.load(folder / f"{world}.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(tmp_path_factory.mktemp("two"), 2)


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= TOLERANCE, name


def assert_same_training(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for gradients, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert_close(gradients, expected)
    assert_close(ours["state"], theirs["state"])
    for metrics, expected in zip(ours["metrics"], theirs["metrics"], strict=True):
        for name in ("loss", "grad_norm", "lr", "update_skipped", "num_updates"):
            assert metrics[name] == approx(expected[name]), name


def measured(outcome: Mapping[str, Any]) -> list[dict[str, float]]:
    return [{k: v for k, v in metrics.items() if not k.startswith("packing_")} for metrics in outcome["metrics"]]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_over_all_rows(alone: Outcomes, case: str, packing: str) -> None:
    assert_same_training(alone[case, packing], alone[case, ALL_ROWS])


@pytest.mark.parametrize("case", CASES)
def test_metrics_do_not_depend_on_packing(alone: Outcomes, case: str) -> None:
    packed, two_by_two = (measured(alone[case, packing]) for packing in PACKINGS)
    assert two_by_two == [approx(metrics) for metrics in packed]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_over_all_rows(alone: Outcomes, on_two: Outcomes, case: str, packing: str) -> None:
    """Where one answer is left, the second rank has none and must take part all the same."""
    assert_same_training(on_two[case, packing], alone[case, ALL_ROWS])
    assert measured(on_two[case, packing]) == [approx(metrics) for metrics in measured(alone[case, packing])]


def test_cases_leave_rows_out_and_still_have_gradients(alone: Outcomes) -> None:
    """Guards the tests above."""
    shares = {case: alone[case, "packed"]["metrics"][0]["samples_with_gradient"] for case in CASES}
    # 15 of the 16 answers are scored. Of these 5 have an advantage, and 4 are the first of their group, which is cut
    # off.
    assert shares.pop("cut-off answers are masked") == approx(3 / 15)
    assert shares.pop("likelihood of rewarded answers") == approx(11 / 15)
    assert shares.pop("kl in the loss, cut-off answers are masked") == approx(11 / 15)
    assert list(shares.values()) == [approx(5 / 15)] * len(shares)
    for case, settings in CASES.items():
        largest = [
            max(float(g.abs().max()) for g in gradients.values()) for gradients in alone[case, ALL_ROWS]["gradients"]
        ]
        has_gradient = [True, False, False, True] if settings.num_updates == 4 else [True] * settings.num_updates
        assert [size > 0 for size in largest] == 2 * has_gradient, case
        assert max(largest) > 1e-4, case
