"""Rendered manifests on two nodes of the local cluster: a run that loses machines ends as the run that does not, bit
for bit, and the token that its pods were given is in no file.

The short form. `make faults ONLY=spot` takes 20 machines away from each of four schedulers, at random moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_runs
from local_runs import skip_without_namespaces
from spot_runs import Interruption, SpotRun, assert_same_end, run_through

STEPS = 24  # so many that the run is not over before, on a fast machine
CASES = {
    "jobset": [Interruption("notice", 1, 2, 0.0), Interruption("SIGKILL", 0, 1, 0.1)],
    "volcano": [Interruption("SIGTERM", 1, 2, 0.1)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    skip_without_namespaces()
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("POSTTRAIN_LOCAL", "HF_TOKEN"):
            patch.setenv(name, "")  # put back afterwards
        yield tmp_path_factory.mktemp("spot")


@pytest.fixture(scope="module")
def material(folder: Path) -> tuple[Path, Path]:
    return tiny_runs.save_model(folder / "model"), tiny_runs.save_data(folder / "data")


@pytest.fixture(scope="module")
def whole(folder: Path, material: tuple[Path, Path]) -> SpotRun:
    run = SpotRun(folder / "whole", "jobset", *material, steps=STEPS)
    assert run_through(run, []) == 0
    return run


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheduler", ["jobset", "volcano"])
def test_a_run_that_loses_machines_ends_as_the_one_that_does_not(
    folder: Path, material: tuple[Path, Path], whole: SpotRun, scheduler: str
) -> None:
    run = SpotRun(folder / "spot", scheduler, *material, steps=STEPS)
    assert run_through(run, CASES[scheduler]) == len(CASES[scheduler])
    assert_same_end(run, whole)
