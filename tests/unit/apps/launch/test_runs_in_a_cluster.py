"""What the objects of a run say, in the words of each scheduler."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.apps.launch import submit
from posttrain.apps.launch.run_checkpoints import checkpoint_rows
from posttrain.apps.launch.runs import RunState, pods_by_rank, state_of
from posttrain.cli import launch_command

INDEX = "batch.kubernetes.io/job-completion-index"
RESTART = "jobset.sigs.k8s.io/restart-attempt"


def pod(name: str, created: int, labels: dict[str, str], annotations: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": str(created),
            "labels": labels,
            "annotations": annotations or {},
        }
    }


def ranks(*pods: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(one.attempt, one.rank, one.name) for one in pods_by_rank(pods)]


def test_pods_of_a_job_are_numbered_by_their_creation() -> None:
    found = ranks(
        pod("c", 3, {INDEX: "1"}), pod("b", 2, {INDEX: "0"}), pod("a", 1, {INDEX: "0"}), pod("d", 1, {INDEX: "1"})
    )
    assert found == [(1, 0, "a"), (1, 1, "d"), (2, 0, "b"), (2, 1, "c")]


def test_a_jobset_numbers_its_attempts_itself() -> None:
    found = ranks(pod("b", 2, {INDEX: "1", RESTART: "3"}), pod("a", 1, {INDEX: "0", RESTART: "3"}))
    assert found == [(4, 0, "a"), (4, 1, "b")]


def test_tasks_of_volcano_follow_each_other() -> None:
    task = "volcano.sh/task-spec"
    head = pod("run-head-0", 1, {task: "head"}, {"volcano.sh/job-version": "2"})
    worker = pod("run-worker-1", 1, {}, {task: "worker", "volcano.sh/job-version": "2"})
    labelled = pod("run-worker-x", 1, {task: "worker", "volcano.sh/task-index": "0", "volcano.sh/job-version": "2"})
    found = ranks(worker, labelled, head)
    assert found == [(3, 0, "run-head-0"), (3, 1, "run-worker-x"), (3, 2, "run-worker-1")]


def test_every_cluster_of_a_rayjob_is_an_attempt() -> None:
    def member(name: str, created: int, cluster: str, kind: str) -> dict[str, Any]:
        return pod(name, created, {"ray.io/cluster": cluster, "ray.io/node-type": kind})

    found = ranks(
        member("n-head", 5, "new", "head"), member("o-worker", 2, "old", "worker"), member("o-head", 1, "old", "head"),
        member("n-w1", 6, "new", "worker"), member("n-w2", 7, "new", "worker"),
    )  # fmt: skip
    assert found == [(1, 0, "o-head"), (1, 1, "o-worker"), (2, 0, "n-head"), (2, 1, "n-w1"), (2, 2, "n-w2")]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, RunState("Running", 0)),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, RunState("Succeeded", 0)),
        ({"conditions": [{"type": "Failed", "status": "True", "message": "why"}]}, RunState("Failed", 0, "why")),
        ({"conditions": [{"type": "Failed", "status": "False"}], "restarts": 2}, RunState("Running", 2)),
        ({"state": {"phase": "Restarting"}, "retryCount": 4}, RunState("Running", 4)),
        ({"state": {"phase": "Aborted", "message": "64"}}, RunState("Failed", 0, "64")),
        ({"state": {"phase": "Pending"}}, RunState("Queued", 0)),
        ({"jobDeploymentStatus": "Retrying", "failed": 3}, RunState("Running", 3)),
        ({"jobDeploymentStatus": "Complete"}, RunState("Succeeded", 0)),
        ({"jobDeploymentStatus": "Failed", "message": "x"}, RunState("Failed", 0, "x")),
    ],
)
def test_phases(status: dict[str, Any], expected: RunState) -> None:
    assert state_of({"spec": {}, "status": status}) == expected


def test_what_kueue_holds_back_is_queued() -> None:
    assert state_of({"spec": {"suspend": True}}).phase == "Queued"


def test_odd_checkpoints_and_metrics_are_left_out(tmp_path: Path) -> None:
    for name in ("step_1", "step_x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_3").symlink_to("nowhere")
    rows = ['"high"', "[1]", "1" + "0" * 400, '{"a": 1}', "null"]
    lines = [f'{{"step": 1, "train/loss": 0.5, "train/reward": {value}}}\n' for value in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (row,) = checkpoint_rows(tmp_path, tmp_path)
    assert (row["step"], row["metrics"]) == (1, {"train/loss": 0.5})


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_log_does_not_write_over_the_lines_before(monkeypatch: Any, capsys: Any, is_followed: bool) -> None:
    said = "step 1\n\x1b[31mred\x1b[0m\n\x1b[2A\x1b[K\x1b[1Gall is well\rover\r\n\x1b]0;title\x07\x1b[?25l"
    cluster = SimpleNamespace(pods=lambda workload: [], log=lambda body, follow: iter([said, "over\r", "over\n"]))
    pod = SimpleNamespace(body={}, uid="1")
    monkeypatch.setattr(launch_command, "_find", lambda args: (cluster, {}))
    monkeypatch.setattr(launch_command, "choose_pod", lambda *_: pod)
    if is_followed:
        submit._print_log(cluster, pod, {})  # type: ignore[arg-type]
    else:
        launch_command._logs(argparse.Namespace(rank=0, attempt=None, follow=False))
    shown = capsys.readouterr().out
    assert "\x1b[31mred\x1b[0m\n" in shown
    assert shown.count("\x1b") == 2
    assert "\r" not in shown.replace("\r\n", "")
    assert r"\x1b[2A\x1b[K\x1b[1Gall is well\rover" in shown
