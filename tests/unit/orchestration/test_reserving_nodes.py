"""Waiting for nodes of a Ray cluster: what is said meanwhile, and when it is known that none is coming."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import InputError
from posttrain.orchestration import ray_cluster
from posttrain.orchestration.workers import RankLayout


class Cluster:
    """A cluster whose time passes when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, joins_at: list[float], gpus: int = 0) -> None:
        self.now, self.joins_at, self.gpus, self.removed = 0.0, joins_at, gpus, False
        monkeypatch.setattr(ray_cluster.ray, "nodes", self.nodes)
        monkeypatch.setattr(ray_cluster.ray, "available_resources", dict)
        monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ray_cluster.time, "sleep", self.sleep)
        monkeypatch.setattr(ray_cluster, "placement_group", self.placement_group)
        monkeypatch.setattr(ray_cluster, "remove_placement_group", lambda group: setattr(self, "removed", True))
        monkeypatch.delenv("POSTTRAIN_WORKER_DEADLINE_S", raising=False)
        monkeypatch.delenv(ray_cluster.CLUSTER_SIZE_VARIABLE, raising=False)

    def nodes(self) -> list[dict[str, Any]]:
        one = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": float(self.gpus)}}
        return [one for joined in self.joins_at if joined <= self.now]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Cluster:
        self.wanted = len(bundles)
        return self

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return len(self.nodes()) >= self.wanted


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_every_half_minute_says_how_many_nodes_there_are_and_how_long_it_waits(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    cluster, said = Cluster(monkeypatch, [0.0, 0.0]), list[str]()
    with pytest.raises(InputError, match=r"cluster\.num_nodes=3 .* needs 3 nodes"):
        ray_cluster.reserve(RankLayout(num_nodes=3, device=device), "10.0.0.1:6379", said.append)
    assert "2 of 3 nodes, waiting, 4 min left" in said
    assert said[-1].startswith("2 of 3 nodes, waiting, ")
    assert 15 <= len(said) <= 22
    assert cluster.removed


def test_a_node_that_joins_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, [0.0, 100.0], gpus=1)
    said = list[str]()
    places = ray_cluster.reserve(RankLayout(num_nodes=2), "10.0.0.1:6379", said.append)
    assert places.use_gpu
    assert [line for line in said if "1 of 2 nodes, waiting" in line]


def test_nodes_that_other_jobs_hold_are_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, said = Cluster(monkeypatch, [0.0, 0.0], gpus=1), list[str]()
    monkeypatch.setattr(cluster, "wait", lambda seconds: cluster.sleep(seconds))
    with pytest.raises(InputError):
        ray_cluster.reserve(RankLayout(num_nodes=2), "10.0.0.1:6379", said.append)
    assert any("2 of 2 nodes, not all of them free, waiting" in line for line in said)


def test_a_launched_cluster_that_is_too_small_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [0.0, 0.0])
    monkeypatch.setenv(ray_cluster.CLUSTER_SIZE_VARIABLE, "2")
    with pytest.raises(InputError, match="=3: this cluster was launched with 2 nodes, and no other"):
        ray_cluster.reserve(RankLayout(num_nodes=3), "10.0.0.1:6379", print)
    assert cluster.now == 0.0
    monkeypatch.setenv(ray_cluster.CLUSTER_SIZE_VARIABLE, "3")
    with pytest.raises(InputError, match="needs 3 nodes"):
        ray_cluster.reserve(RankLayout(num_nodes=3, device="cpu"), "10.0.0.1:6379", lambda text: None)
