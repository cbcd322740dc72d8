"""Runs on the local cluster, for tests: rendered as for any cluster, executed in namespaces where that is allowed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import make_request

from posttrain.apps.launch.local.local_cluster import LocalCluster, claim_folder, why_impossible
from posttrain.apps.launch.runs import ENDED, RunPod, pods_by_rank, state_of
from posttrain.apps.launch.workloads import render_run

LIMIT_S = 120.0
Object = dict[str, Any]


@functools.cache
def _why() -> str | None:
    return why_impossible()


def skip_without_namespaces() -> None:
    if (why := _why()) is not None:
        pytest.skip(f"the local cluster cannot run here: {why}")


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.05)
    return found


class ProgramRun:
    """A run whose pods execute a program of the test instead of `posttrain node`."""

    def __init__(self, folder: Path, scheduler: str, command: Sequence[str], *overrides: str, nodes: int = 2) -> None:
        profile = {"cluster": {"kind": "local"}, "scheduler": {"kind": scheduler}}
        settings = ("cluster.gpus_per_node=1", "policy.model_name=/shared/model")
        self.request = make_request(folder, profile, *overrides, nodes=nodes, run=settings)
        self.name = self.request.name
        self.objects = render_run(self.request)
        _replace_command(self.objects, list(command))
        if scheduler == "rayjob":
            self.objects[-1]["spec"]["entrypoint"] = " ".join(command)
        self.cluster = LocalCluster()
        self.claim = claim_folder(self.request.profile.storage.claim)

    def start(self) -> None:
        self.cluster.create(self.objects)

    @property
    def workload(self) -> Object:
        (found,) = self.cluster.workloads(self.name)
        return found

    def pods(self) -> list[RunPod]:
        return pods_by_rank(self.cluster.pods(self.workload))

    def log(self, pod: RunPod) -> str:
        return "".join(self.cluster.log(pod.body, follow=False))

    def wait_for_phase(self, *phases: str) -> str:
        return str(
            wait_for(lambda: (phase := state_of(self.workload).phase) in phases and phase, f"{self.name} is {phases}")
        )

    def wait_for_end(self) -> str:
        """Its phase, once every pod has ended too."""
        phase = self.wait_for_phase(*ENDED)
        wait_for(lambda: not any(pod.is_alive for pod in self.pods()), "its pods end")
        return phase

    def close(self) -> None:
        for workload in self.cluster.workloads(self.name):
            self.cluster.delete(workload)


def _replace_command(value: Any, command: list[str]) -> None:
    if isinstance(value, dict):
        if "containers" in value:
            value["containers"][0]["command"] = command
        for inner in value.values():
            _replace_command(inner, command)
    elif isinstance(value, list):
        for inner in value:
            _replace_command(inner, command)
