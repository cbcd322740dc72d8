"""Manifests of a run on this machine: those of a cluster, on machines without GPUs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import CRDS, make_profile, make_request

from posttrain.apps.launch.lint.check import CustomSchemas, check_manifests
from posttrain.apps.launch.local import local_cluster
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.apps.launch.run_checkpoints import pod_spec
from posttrain.apps.launch.workloads import render_run
from posttrain.errors import InputError

LOCAL: dict[str, Any] = {"cluster": {"kind": "local"}}


@pytest.mark.parametrize("scheduler", ["job", "jobset", "volcano", "rayjob"])
def test_manifests_of_this_machine_have_no_errors(tmp_path: Path, scheduler: str) -> None:
    objects = render_run(make_request(tmp_path, LOCAL, f"scheduler.kind={scheduler}"))
    manifests = [Manifest("local", number, body) for number, body in enumerate(objects)]
    crds = CustomSchemas(CRDS) if CRDS.is_dir() else None
    assert check_manifests(manifests, crds).errors == []


def test_pods_ask_for_no_gpus_and_look_for_notices(tmp_path: Path) -> None:
    container = pod_spec(render_run(make_request(tmp_path, LOCAL))[-1])["containers"][0]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["POSTTRAIN_GPUS_PER_NODE"] == "0"
    assert env["POSTTRAIN_NOTICE"] == "aws"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_a_local_profile_keeps_the_values_that_it_sets(tmp_path: Path) -> None:
    own = {**LOCAL, "nodes": {"grace_s": 15, "capacity": "on_demand"}, "storage": {"claim": "mine", "mount": "/data"}}
    profile = make_profile(tmp_path, own)
    assert (profile.nodes.grace_s, profile.nodes.capacity, profile.nodes.gpus) == (15, "on_demand", 0)
    assert (profile.storage.claim, profile.storage.mount) == ("mine", "/data")


@pytest.mark.parametrize("nodes", [{"instance_type": "p5en.48xlarge"}, {"gpus": 8}])
def test_gpus_on_this_machine_are_refused(tmp_path: Path, nodes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="pods have no GPUs"):
        make_profile(tmp_path, {**LOCAL, "nodes": nodes})


def test_a_python_that_pods_would_not_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster.sys, "platform", "linux")
    monkeypatch.setattr(local_cluster, "ip_command", lambda: "/sbin/ip")
    monkeypatch.setattr(local_cluster.sys, "prefix", "/tmp/clone/.venv")
    found = local_cluster.why_impossible()
    assert found == (
        "a pod has a /tmp of its own, and would not find /tmp/clone/.venv: install posttrain outside of /tmp"
    )


def test_values_of_secrets_are_not_in_the_environment_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every program of the same user can read it in /proc."""
    given = tmp_path / "given"
    code = (
        f"import os, sys, pathlib; pathlib.Path({str(given)!r}).write_text(repr((dict(os.environ), sys.stdin.read())))"
    )
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", f"{code}; open({str(tmp_path / 'state.json')!r}, 'w')"], **options)

    monkeypatch.setattr("posttrain.apps.launch.local.local_cluster.subprocess.Popen", started)
    monkeypatch.setenv("HF_TOKEN", "value-of-the-user")
    local_cluster.LocalCluster()._start(tmp_path, {"HF_TOKEN": "value-of-the-user", "run-control/secret": "drawn"})
    environment, said = ast.literal_eval(given.read_text())
    assert json.loads(said) == {"HF_TOKEN": "value-of-the-user", "run-control/secret": "drawn"}
    assert not {"value-of-the-user", "drawn"} & set(environment.values())
    assert "drawn" not in str(environment)
