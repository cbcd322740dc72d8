"""A cluster that does not answer: runs elsewhere are found, and a run is followed on when the connection is back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.apps.launch import submit
from posttrain.apps.launch.pod_template import RUN_LABEL
from posttrain.apps.launch.runs import ClusterUnreachable, find_run
from posttrain.errors import InputError


class FewAnswers:
    """A Ray cluster with one job; the calls whose numbers are in `lost` are not answered."""

    title, poll_s = "a cluster", 0.0

    def __init__(self, names: list[str], lost: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.names, self.lost, self.num_calls = names, lost, 0

    def workloads(self, name: str | None = None) -> list[Any]:
        self.num_calls += 1
        if self.num_calls in self.lost:
            raise ClusterUnreachable("no answer")
        phase = "Complete" if self.num_calls > 4 else "Running"
        found = [one for one in self.names if name in (None, one)]
        return [
            {
                "kind": "Ray job",
                "metadata": {"name": one, "namespace": "", "labels": {RUN_LABEL: one}},
                "status": {"jobDeploymentStatus": phase},
            }
            for one in found
        ]

    def pods(self, workload: Any) -> list[Any]:
        return []

    def log(self, pod: Any, follow: bool) -> Iterator[str]:
        yield ""


def test_a_run_is_found_although_another_cluster_does_not_answer() -> None:
    silent, other = FewAnswers([], {1}), FewAnswers(["mine"])
    assert find_run([silent, other], "mine")[0] is other  # type: ignore[list-item]


def test_a_run_that_is_nowhere_else_may_be_in_the_cluster_that_does_not_answer() -> None:
    with pytest.raises(ClusterUnreachable):
        find_run([FewAnswers([], {1}), FewAnswers(["other"])], "mine")  # type: ignore[list-item]


def test_jobs_of_one_name_are_named_in_full() -> None:
    with pytest.raises(InputError, match=r"2 runs have this name \(Ray job mine, Ray job mine\)"):
        find_run([FewAnswers(["mine", "mine"])], "mine")  # type: ignore[list-item]


def test_a_run_is_followed_after_requests_that_were_lost() -> None:
    cluster = FewAnswers(["mine"], {2, 3})
    assert submit.follow(cluster, "mine") == 0  # type: ignore[arg-type]
    assert cluster.num_calls == 5


def test_following_ends_when_the_cluster_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "UNREACHABLE_LIMIT_S", 0.0)
    with pytest.raises(ClusterUnreachable):
        submit.follow(FewAnswers(["mine"], {2}), "mine")  # type: ignore[arg-type]
