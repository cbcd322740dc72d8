"""Commands that talk to a cluster, against a stand-in of its API server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from launch_profiles import EKS, write_profile

from posttrain.cli.main import main

JOBSET = "jobset.x-k8s.io/v1alpha2"
SPACE = "/api/v1/namespaces/training"
RUN = ["cluster.num_nodes=2", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/math"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster that has what the profile needs."""
    server = ApiServer(JOBSET)
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("POSTTRAIN_LOCAL", str(tmp_path / "local"))
    monkeypatch.setattr("posttrain.apps.launch.kubernetes_cluster.KubernetesCluster.poll_s", 0.01)
    server.put(SPACE)
    server.put(f"{SPACE}/persistentvolumeclaims/fsx-pvc")
    server.put(f"{SPACE}/secrets/hf")
    yield server
    server.close()


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return str(write_profile(tmp_path, EKS))


def launch(profile: str, *words: str) -> int:
    return main(["launch", "--on", profile, "grpo", *RUN, "--yes", "--detach", *words])


def pod(rank: int, attempt: int, phase: str = "Running", **state: Any) -> dict[str, Any]:
    labels = {"posttrain.dev/run": "grpo-math", "batch.kubernetes.io/job-completion-index": str(rank)}
    labels["jobset.sigs.k8s.io/restart-attempt"] = str(attempt - 1)
    name = f"grpo-math-node-0-{rank}-a{attempt}"
    return {
        "metadata": {"name": name, "namespace": "training", "labels": labels, "creationTimestamp": f"{attempt}"},
        "spec": {"containers": [{"name": "posttrain"}], "nodeName": f"n{rank}", "terminationGracePeriodSeconds": 110},
        "status": {"phase": phase, "containerStatuses": [{"state": state}]},
    }


def put_pods(server: ApiServer, *pods: dict[str, Any]) -> None:
    for one in pods:
        server.put(f"{SPACE}/pods/{one['metadata']['name']}", one)


# -- submitting
# ----------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_with_its_price_and_created(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile) == 0
    assert server.named("jobsets") == ["grpo-math"]
    assert server.named("configmaps") == ["grpo-math-config"]
    out = capsys.readouterr().out
    assert "2 pods with 8 GPUs on p5en.48xlarge (spot)" in out
    assert "$" in out


def test_the_secret_of_a_run_is_drawn_at_its_creation_and_shown_nowhere(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile) == 0
    tries = [body for method, path, body in server.requests if method == "POST" and path == f"{SPACE}/secrets"]
    assert [sorted(body.get("stringData", {})) for body in tries] == [[], ["secret"]], "the dry run has no value"
    value = tries[-1]["stringData"]["secret"]
    assert len(value) == 64
    elsewhere = [body for _, path, body in server.requests if path != f"{SPACE}/secrets"]
    assert value not in json.dumps(elsewhere)
    assert launch(profile, "--name", "other") == 0
    assert server.objects[f"{SPACE}/secrets/other-control"]["stringData"]["secret"] != value, "each run has another"
    assert main(["launch", "status", "grpo-math"]) == 0
    printed = capsys.readouterr()
    assert value not in printed.out + printed.err
    assert main(["launch", "stop", "grpo-math"]) == 0
    assert sorted(server.named("secrets")) == ["hf", "other-control"]
    assert server.named("networkpolicies") == ["other-control"]
    assert ("GET", f"{SPACE}/secrets", {}) not in server.requests, "a list would contain all values"


def test_objects_of_a_run_go_with_its_workload(server: ApiServer, profile: str) -> None:
    """After its time to live the cluster removes the workload, and with it what it owns."""
    assert launch(profile) == 0
    owner = {"apiVersion": JOBSET, "kind": "JobSet", "name": "grpo-math", "uid": "uid-of-grpo-math"}
    for plural in ("configmaps", "secrets", "networkpolicies", "services"):
        for path, body in server.objects.items():
            if f"/{plural}/grpo-math" in path:
                assert body["metadata"]["ownerReferences"] == [owner], path
    assert server.objects[f"{SPACE}/secrets/grpo-math-control"]["metadata"]["ownerReferences"] == [owner]


def test_a_user_who_may_not_change_objects_can_launch(server: ApiServer, profile: str) -> None:
    server.refused["PATCH /"] = (403, "cannot patch")
    assert launch(profile) == 0
    assert server.named("jobsets") == ["grpo-math"]


@pytest.mark.parametrize("labels", [{}, {"labels": None}, {"labels": {"posttrain.dev/run": "other"}}])
def test_stop_leaves_a_secret_that_is_not_of_the_run(server: ApiServer, profile: str, labels: dict[str, Any]) -> None:
    run = {"metadata": {"name": "grpo-math", "namespace": "training", "labels": {"posttrain.dev/run": "grpo-math"}}}
    server.put("/apis/jobset.x-k8s.io/v1alpha2/namespaces/training/jobsets/grpo-math", run)
    server.put(f"{SPACE}/secrets/grpo-math-control", {"metadata": {"name": "grpo-math-control", **labels}})
    assert main(["launch", "stop", "grpo-math"]) == 0
    assert server.named("jobsets") == []
    assert server.named("secrets") == ["hf", "grpo-math-control"]


def test_objects_are_checked_by_the_server_before_the_first_is_created(server: ApiServer, profile: str) -> None:
    server.refused["POST /jobsets"] = (422, "spec.replicatedJobs: Invalid value")
    assert launch(profile) == 64
    assert server.named("configmaps") == []


def test_a_submit_that_fails_half_way_removes_what_it_made(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refused["POST /jobsets"] = (500, "etcdserver: request timed out")  # not in a dry run
    assert launch(profile) == 64
    assert ("DELETE", f"{SPACE}/configmaps/grpo-math-config", {}) in server.requests
    assert server.named("configmaps") == []
    assert "etcdserver: request timed out" in capsys.readouterr().err


def test_without_a_yes_nothing_is_created(
    server: ApiServer, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--on", profile, "grpo", *RUN]
    assert main(words) == 64  # no terminal
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(words) == 0
    assert server.named("configmaps") == []


MISSING = {
    "namespace": (f"{SPACE}", "kubectl create namespace training"),
    "claim": (f"{SPACE}/persistentvolumeclaims/fsx-pvc", "claim fsx-pvc does not exist"),
    "secret": (f"{SPACE}/secrets/hf", "kubectl create secret generic hf"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_the_cluster_lacks_is_named_with_its_remedy(
    server: ApiServer, profile: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, remedy = MISSING[what]
    del server.objects[path]
    assert launch(profile) == 64
    assert remedy in capsys.readouterr().err
    assert not [request for request in server.requests if request[0] == "POST" and "reviews" not in request[1]]
    assert main(["launch", "doctor", "--on", profile]) == 64
    assert f"missing  {what}" in capsys.readouterr().out


def test_an_operator_that_is_not_installed_is_named(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.groups.remove(JOBSET)
    assert launch(profile) == 64
    assert "install JobSet" in capsys.readouterr().err


def test_a_missing_permission_is_named(server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.forbidden |= {"create jobsets", "create networkpolicies"}
    assert launch(profile) == 64
    said = capsys.readouterr().err
    assert "you may not create jobsets.jobset.x-k8s.io in namespace training" in said
    assert "you may not create networkpolicies.networking.k8s.io in namespace training" in said


def test_doctor_starts_the_image_if_it_is_asked_to(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs["reader"] = "posttrain 0.1\n"
    assert main(["launch", "doctor", "--on", profile, "--image"]) == 0
    assert "ok       image registry.example.com/posttrain" in capsys.readouterr().out
    assert server.named("pods") == []

    def without_posttrain(place: str, body: dict[str, Any]) -> None:
        terminated = {"exitCode": 128, "message": 'exec: "posttrain": executable file not found in $PATH'}
        body["status"] = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}

    server.on_create = without_posttrain  # type: ignore[method-assign]
    assert main(["launch", "doctor", "--on", profile, "--image"]) == 64
    assert "does not start posttrain" in capsys.readouterr().out
    assert server.named("pods") == []


def test_what_may_not_be_seen_is_unknown_and_not_missing(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refused[f"GET {SPACE}/persistentvolumeclaims"] = (403, "forbidden")
    assert main(["launch", "doctor", "--on", profile]) == 0
    assert "unknown  claim fsx-pvc (forbidden)" in capsys.readouterr().out


def test_values_of_secrets_are_not_fetched(server: ApiServer, profile: str) -> None:
    assert launch(profile) == 0
    assert "PartialObjectMetadata" in server.accepts[f"{SPACE}/secrets/hf"]


def test_volcano_that_waits_for_machines_which_karpenter_does_not_buy_is_refused(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.groups |= {"batch.volcano.sh/v1alpha1", "scheduling.volcano.sh/v1beta1", "karpenter.sh/v1"}
    server.put("/apis/scheduling.volcano.sh/v1beta1/queues/posttrain")
    place = "/api/v1/namespaces/volcano-system/configmaps/volcano-scheduler-configmap"
    settings = 'actions: "enqueue, allocate"\ntiers: [{plugins: [{name: gang}, {name: overcommit}]}]\n'
    server.put(place, {"data": {"volcano-scheduler.conf": settings}})
    profile = str(write_profile(tmp_path, {**EKS, "scheduler": {"kind": "volcano"}}))
    assert launch(profile) == 64
    assert "Take enqueue out of actions" in capsys.readouterr().err
    server.put(place, {"data": {"volcano-scheduler.conf": settings.replace("enqueue, ", "")}})
    assert launch(profile) == 0


def test_a_name_that_exists_is_refused(server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(profile) == 0
    assert launch(profile) == 64
    assert "posttrain launch stop grpo-math" in capsys.readouterr().err
    assert launch(profile, "--name", "other") == 0


def test_a_cluster_that_does_not_answer_is_69(
    server: ApiServer, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    assert launch(profile) == 69
    assert "does not answer" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert launch(profile) == 69
    assert "no cluster is configured" in capsys.readouterr().err


def test_a_login_that_is_not_accepted_is_69(
    server: ApiServer, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(path.read_text().replace("login-of-a-user", "old"))
    assert launch(profile) == 69
    assert "log in again" in capsys.readouterr().err


def test_without_the_client_only_talking_to_a_cluster_fails(
    server: ApiServer, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "posttrain.apps.launch.kubernetes_cluster", raising=False)
    assert launch(profile) == 64
    assert "pip install 'posttrain[k8s]'" in capsys.readouterr().err
    assert main(["launch", "render", "--on", profile, "grpo", *RUN]) == 0
    assert main(["launch", "list", "--on", "local"]) == 0


# -- following
# -----------------------------------------------------------------------------------------------------------


def test_following_prints_rank_0_and_ends_with_the_run(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_of_run(place: str, body: dict[str, Any]) -> None:
        if body["kind"] == "JobSet":
            body["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
            put_pods(server, pod(0, 1, "Succeeded", terminated={"exitCode": 0}), pod(1, 1, "Succeeded"))
            server.logs["grpo-math-node-0-0-a1"] = "step 1\nstep 2\n"

    server.on_create = end_of_run  # type: ignore[method-assign]
    assert main(["launch", "--on", profile, "grpo", *RUN, "--yes"]) == 0
    assert "step 1\nstep 2\n" in capsys.readouterr().out


def test_a_connection_that_breaks_is_made_again_and_nothing_is_printed_twice(
    server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["step 1\nste", "step 1\nstep 2\n", "step 1\nstep 2\nstep 3\n"])
    answer = server.answer

    def growing(method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        if not path.endswith("/log"):
            return answer(method, path, query, body)
        text = next(texts)
        if text.endswith("2\n"):  # the run is over before the next look
            put_pods(server, pod(0, 1, "Succeeded", terminated={"exitCode": 0}))
            for place, one in server.objects.items():
                if place.endswith("/jobsets/grpo-math"):
                    one["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
        return 200, text

    monkeypatch.setattr(server, "answer", growing)
    server.on_create = lambda place, body: put_pods(server, pod(0, 1))  # type: ignore[method-assign]
    assert main(["launch", "--on", profile, "grpo", *RUN, "--yes"]) == 0
    assert capsys.readouterr().out.endswith("step 1\nstep 2\nstep 3\n")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, "image.pull_secret"),
        (
            {"terminated": {"exitCode": 128, "message": 'exec: "posttrain": executable file not found'}},
            "the image lacks",
        ),
    ],
)
def test_an_image_that_cannot_start_ends_the_command_and_leaves_nothing(
    server: ApiServer, profile: str, state: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(place: str, body: dict[str, Any]) -> None:
        if body["kind"] == "JobSet":
            put_pods(server, pod(0, 1, "Pending", **state))

    server.on_create = broken  # type: ignore[method-assign]
    assert main(["launch", "--on", profile, "grpo", *RUN, "--yes"]) == 64
    assert words in capsys.readouterr().err
    assert server.named("jobsets") == server.named("configmaps") == []


# -- runs that exist
# -----------------------------------------------------------------------------------------------------


@pytest.fixture
def running(server: ApiServer, profile: str, capsys: pytest.CaptureFixture[str]) -> ApiServer:
    assert launch(profile) == 0
    for path, body in server.objects.items():
        if path.endswith("/jobsets/grpo-math"):
            body["status"] = {"restarts": 1}
    put_pods(server, pod(0, 1, "Failed", terminated={"exitCode": 85}), pod(0, 2), pod(1, 2))
    server.logs |= {f"grpo-math-node-0-{rank}-a{attempt}": f"rank {rank}, attempt {attempt}\n" for rank in (0, 1)
                    for attempt in (1, 2)}  # fmt: skip
    capsys.readouterr()
    return server


def test_runs_are_found_by_label(running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["kind"], row["phase"], row["restarts"]) == ("grpo-math", "JobSet", "Running", 1)
    assert main(["launch", "status", "grpo-math"]) == 0
    out = capsys.readouterr().out
    assert "attempt 1, rank 0: Failed, exit code 85" in out
    assert "attempt 2, rank 1: Running" in out


def test_a_user_who_may_see_one_namespace_only_finds_its_runs(
    running: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for plural in ("jobs", "jobsets"):
        running.refused[f"GET v1/{plural}"] = running.refused[f"GET v1alpha2/{plural}"] = (
            403,
            "cluster-wide: forbidden",
        )
    assert main(["launch", "list"]) == 0
    assert "grpo-math" in capsys.readouterr().out


def test_logs_of_an_attempt_and_a_rank(running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "logs", "grpo-math", "--attempt", "2", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "rank 1, attempt 2\n"
    assert main(["launch", "logs", "grpo-math", "--attempt", "1"]) == 0
    assert capsys.readouterr().out == "rank 0, attempt 1\n"
    assert main(["launch", "logs", "grpo-math", "--attempt", "1", "--rank", "1"]) == 64
    assert "of rank 1 of attempt 2" in capsys.readouterr().err
    assert main(["launch", "logs", "grpo-math", "--rank", "5"]) == 64


def test_checkpoints_are_read_by_a_pod_on_the_machine_of_rank_0_and_it_is_removed(
    running: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": 4, "saved": "2026-11-16T12:00:00+00:00", "bytes": 2**20, "metrics": {"train/reward": 0.5}}]
    running.logs["reader"] = json.dumps(rows)
    assert main(["launch", "checkpoints", "grpo-math"]) == 0
    assert "step 4" in (out := capsys.readouterr().out)
    assert "train/reward 0.5" in out
    (made,) = [body for method, path, body in running.requests if method == "POST" and path.endswith("/pods")]
    assert made["spec"]["nodeName"] == "n0"
    assert "nvidia.com/gpu" not in made["spec"]["containers"][0]["resources"]["limits"]
    assert "/shared/math" in made["spec"]["containers"][0]["command"]
    assert made["metadata"]["name"] not in running.named("pods")


def test_interrupt_evicts_the_pod_of_a_rank(running: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "interrupt", "grpo-math", "--rank", "1", "--notice", "15"]) == 0
    (eviction,) = running.evictions
    assert eviction["metadata"]["name"] == "grpo-math-node-0-1-a2"
    assert eviction["deleteOptions"] == {"gracePeriodSeconds": 15}


def test_stop_removes_everything_of_the_run_and_nothing_else(running: ApiServer) -> None:
    running.put(f"{SPACE}/configmaps/other", {"metadata": {"name": "other", "labels": {}}})
    assert main(["launch", "stop", "grpo-math"]) == 0
    assert running.named("jobsets") == []
    assert running.named("configmaps") == ["other"]
    assert main(["launch", "stop", "grpo-math"]) == 64
