"""Runs as jobs of a Ray cluster, against a stand-in of Ray's Jobs API."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from launch_profiles import EKS, write_profile

from posttrain.apps.launch import ray_jobs
from posttrain.apps.launch.ray_jobs import RayJobs
from posttrain.cli.main import main

RUN = ["grpo", "cluster.num_nodes=2", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/math"]
TOKEN = "token-of-the-cluster"


class JobsApi:
    """Jobs run until a test ends them; small ones end at once. `refused` maps "METHOD /path" to status and text; a
    status of 0 breaks the connection.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.packages: dict[str, bytes] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []
        self.small = ("SUCCEEDED", "Runtime env is setting up.\n[]\n")  # status and log of jobs without a label
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None: ...

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                api.requests.append(f"{self.command} {self.path}")
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    status, text = 401, "Unauthorized: Missing authentication token"
                else:
                    status, text = api.answer(self.command, self.path, body)
                if status:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = do_DELETE = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        place, name = f"{method} {path}", path.split("/")[3] if path.count("/") > 2 else ""
        refusal = self.refused.get(place.rpartition("/_ray_pkg")[0] or place)
        if place == "POST /api/jobs/" and (refusal is None or refusal[0] == 0):
            self._submit(json.loads(body))
        if refusal is not None:
            return refusal
        if path == "/api/version":
            return 200, json.dumps({"ray_version": "2.60.0"})
        if "/packages/" in path:
            package = path.rpartition("/")[2]
            if method == "PUT":
                self.packages[package] = body
            return (200, "") if package in self.packages else (404, "does not exist")
        if path == "/api/jobs/":
            return 200, json.dumps(list(self.jobs.values()) if method == "GET" else {})
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        job = self.jobs[name]
        if path.endswith("/stop"):
            if job["status"] == "RUNNING":
                self.end(name, "STOPPED", None)
            return 200, "{}"
        if path.endswith("/logs"):
            return 200, json.dumps({"logs": job["log"]})
        if method == "DELETE":
            if job["status"] == "RUNNING":
                return 500, "Traceback (most recent call last):\nRuntimeError: non-terminal state RUNNING.\n."
            del self.jobs[name]
        return 200, json.dumps(job)

    def _submit(self, body: dict[str, Any]) -> None:
        status, log = self.small if body.get("metadata") is None else ("RUNNING", "step 1\n")
        self.jobs[body["submission_id"]] = {**body, "status": status, "log": log, "start_time": 1_790_000_000_000}

    def end(self, name: str, status: str, code: int | None) -> None:
        self.jobs[name] |= {"status": status, "driver_exit_code": code, "message": f"Job failed.\nthe end of {name}\n."}

    @property
    def only(self) -> dict[str, Any]:
        (job,) = self.jobs.values()
        return job


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobsApi]:
    api = JobsApi()
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("POSTTRAIN_LOCAL", str(tmp_path / "local"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr("posttrain.apps.launch.ray_jobs.RayJobs.poll_s", 0.001)
    yield api
    api.close()


@pytest.fixture
def profile(ray: JobsApi, tmp_path: Path) -> str:
    scheduler = {"kind": "raycluster", "ray_address": ray.url}
    return str(write_profile(tmp_path, {**EKS, "scheduler": scheduler, "env": {"NCCL_DEBUG": "INFO"}}))


def launch(profile: str, *words: str) -> int:
    return main(["launch", "--on", profile, *RUN, "--yes", *words])


# -- submitting
# ----------------------------------------------------------------------------------------------------------


def test_config_and_files_travel_as_the_working_directory(
    ray: JobsApi, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text("def odd(prompt, response, reference): return 1.0\n")
    reward = ["data.default.env_name=mine", f"env.mine.function={tmp_path}/reward.py:odd"]
    assert launch(profile, "--detach", *reward) == 0
    assert "2 pods with 8 GPUs on p5en.48xlarge (spot), as a job of the Ray cluster at" in capsys.readouterr().out
    job = ray.only
    ((name, package),) = ray.packages.items()
    assert job["runtime_env"]["working_dir"] == f"gcs://{name}"
    files = zipfile.ZipFile(io.BytesIO(package))
    assert files.namelist() == ["config.yaml", "files/0/reward.py"]
    assert "function: files/0/reward.py:odd" in files.read("config.yaml").decode()
    assert job["entrypoint"] == "exec posttrain node driver"
    assert job["runtime_env"]["env_vars"] == {
        "NCCL_DEBUG": "INFO",
        "POSTTRAIN_RUN": "grpo-math",
        "POSTTRAIN_KIND": "grpo",
        "POSTTRAIN_CONFIG": "config.yaml",
        "RAY_JOB_STOP_WAIT_TIME_S": "110",  # Ray's own three seconds are too few for a save
    }
    assert job["metadata"]["posttrain.dev/run"] == "grpo-math"


def test_the_same_files_are_uploaded_once(ray: JobsApi, profile: str) -> None:
    assert launch(profile, "--detach") == launch(profile, "--detach", "--name", "again") == 0
    assert sum(request.startswith("PUT") for request in ray.requests) == 1


def test_a_name_that_exists_is_refused_before_anything_is_sent(
    ray: JobsApi, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile, "--detach") == 0
    sent = list(ray.jobs)
    assert launch(profile, "--detach") == 64
    assert "posttrain launch stop grpo-math" in capsys.readouterr().err
    assert list(ray.jobs) == sent


@pytest.mark.parametrize(
    ("place", "answer", "code", "words"),
    [
        ("GET /api/version", (200, "<html>"), 64, "is not an answer of Ray's Jobs API"),
        ("GET /api/version", (404, "Not Found"), 64, "404, Not Found"),
        ("PUT /api/packages/gcs", (500, "Traceback\nRuntimeError: too large\n."), 64, "500, RuntimeError: too large"),
        (
            "POST /api/jobs/",
            (500, "No available agent to submit job, please try again later."),
            64,
            "No available agent",
        ),
        ("POST /api/jobs/", (0, ""), 69, "does not answer"),
    ],
)
def test_a_submit_that_fails_leaves_no_job(
    ray: JobsApi,
    profile: str,
    place: str,
    answer: tuple[int, str],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray_jobs, "_AGENT_S", 0.0)
    ray.refused[place] = answer
    assert launch(profile, "--detach") == code
    assert words in capsys.readouterr().err
    assert ray.jobs == {}


def test_a_submit_waits_for_the_agent_of_a_head_that_just_started(
    ray: JobsApi, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.refused["POST /api/jobs/"] = 500, "No available agent to submit job, please try again later."
    monkeypatch.setattr(ray_jobs.time, "sleep", lambda _: ray.refused.clear())
    assert launch(profile, "--detach") == 0
    assert ray.requests.count("POST /api/jobs/") == 2


def test_a_cluster_that_does_not_answer_is_69_with_the_way_to_it(
    ray: JobsApi, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.close()
    assert launch(profile) == 69
    assert "kubectl port-forward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RAY_AUTH_TOKEN": "old-token"}, "the one that was sent is another"),
        ({"RAY_AUTH_MODE": "disabled"}, "none was found here"),
        ({"RAY_AUTH_TOKEN": "", "HOME": "/none"}, "none was found here"),
    ],
)
def test_a_token_that_is_missing_or_wrong_is_69(
    ray: JobsApi,
    profile: str,
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch(profile) == 69
    shown = capsys.readouterr().err
    assert words in shown
    assert "old-token" not in shown
    assert ray.jobs == {}


def test_the_token_is_read_from_the_file_that_ray_reads(
    ray: JobsApi, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert launch(profile, "--detach") == 64
    assert "RAY_AUTH_TOKEN_PATH" in capsys.readouterr().err
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert launch(profile, "--detach") == 0


# -- jobs that exist
# -----------------------------------------------------------------------------------------------------


def end_at_once(ray: JobsApi, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Jobs fail with `code` when they are submitted."""
    submit = ray._submit

    def submit_and_end(body: dict[str, Any]) -> None:
        submit(body)
        ray.end(body["submission_id"], "FAILED", code)

    monkeypatch.setattr(ray, "_submit", submit_and_end)


def test_following_prints_the_driver_and_ends_with_its_code(
    ray: JobsApi, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_at_once(ray, monkeypatch, 64)
    assert launch(profile) == 64
    out, err = capsys.readouterr()
    assert out.endswith("step 1\n")
    assert "-- grpo-math: Failed: exit code 64" in err


@pytest.mark.parametrize(("num_mib", "num_polls"), [(0, 1), (5, 6), (40, 30)])
def test_a_long_log_is_read_less_often_and_its_end_is_not_missed(
    num_mib: int, num_polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job writes a line before each poll, and ends after the log was read twice."""
    jobs, job, asked = RayJobs("http://127.0.0.1:1"), {"status": "RUNNING"}, list[str]()
    log = ["x" * (num_mib * 2**20) + "\n"]

    def answer(method: str, path: str) -> dict[str, str]:
        asked.append(path)
        return {"logs": "".join(log)} if path.endswith("/logs") else dict(job)

    def poll(seconds: float) -> None:
        log.append(f"line {len(log)}\n")
        if asked.count("/api/jobs/it/logs") == 2:
            job["status"] = "SUCCEEDED"

    monkeypatch.setattr(jobs, "_call", answer)
    monkeypatch.setattr("posttrain.apps.launch.ray_jobs.time.sleep", poll)
    parts = list(jobs.log({"metadata": {"name": "it"}}, follow=True))
    assert [part.count("\n") for part in parts] == [1, num_polls, 1]
    assert "".join(parts) == "".join(log)


def test_an_image_without_posttrain_ends_the_command_and_leaves_nothing(
    ray: JobsApi, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_at_once(ray, monkeypatch, 127)
    assert launch(profile) == 64
    assert "the image lacks it; see Dockerfile" in capsys.readouterr().err
    assert ray.jobs == {}


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("FAILED", 85, "the same launch resumes it"),
        ("FAILED", None, "Failed, attempt 1: the end of grpo-math-"),
        ("SUCCEEDED", 0, "Succeeded, attempt 1\n"),
    ],
)
def test_status_says_how_a_job_ended(
    ray: JobsApi, profile: str, status: str, code: int | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile, "--detach") == 0
    ray.end(next(iter(ray.jobs)), status, code)
    assert main(["launch", "status", "grpo-math", "--on", profile]) == 0
    assert words in capsys.readouterr().out


def test_jobs_are_found_by_their_label_at_the_address_of_rays_variable(
    ray: JobsApi, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile, "--detach") == 0
    ray.jobs["theirs"] = {"submission_id": "theirs", "status": "RUNNING", "metadata": None}
    capsys.readouterr()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"{ray.url}/")
    assert main(["launch", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["kind"], row["phase"]) == ("grpo-math", "Ray job", "Running")
    assert main(["launch", "logs", "grpo-math"]) == 0
    assert capsys.readouterr().out == "step 1\n"
    for wrong in ("127.0.0.1:8265", "http://me:secret@head:8265"):
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", wrong)
        assert main(["launch", "list"]) == 64
        shown = capsys.readouterr().err
        assert "http://HOST:PORT is accepted" in shown
        assert "secret" not in shown


def test_stop_ends_a_job_and_removes_it(ray: JobsApi, profile: str) -> None:
    assert launch(profile, "--detach") == 0
    assert main(["launch", "stop", "grpo-math", "--on", profile]) == 0
    assert ray.jobs == {}
    assert main(["launch", "stop", "grpo-math", "--on", profile]) == 64


def test_checkpoints_are_read_by_a_small_job_that_is_removed(
    ray: JobsApi, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(profile, "--detach") == 0
    row = {"step": 4, "saved": "2026-11-01", "bytes": 2**20, "metrics": {"train/reward": 0.5}}
    ray.small = ("SUCCEEDED", f"Running entrypoint\n{json.dumps([row])}\n")
    assert main(["launch", "checkpoints", "grpo-math", "--on", profile]) == 0
    assert "step 4" in capsys.readouterr().out
    ray.small = ("FAILED", "posttrain: error: no such folder\n")
    assert main(["launch", "checkpoints", "grpo-math", "--on", profile]) == 64
    assert "no such folder" in capsys.readouterr().err
    assert len(ray.jobs) == 1


def test_a_job_has_no_machine_to_interrupt(ray: JobsApi, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(profile, "--detach") == 0
    assert main(["launch", "interrupt", "grpo-math", "--on", profile]) == 64
    assert "name of the RayCluster" in capsys.readouterr().err


def test_doctor_asks_the_cluster_and_starts_the_image_if_told_to(
    ray: JobsApi, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "doctor", "--on", profile, "--image"]) == 0
    assert "ok       Jobs API of Ray 2.60.0" in capsys.readouterr().out
    ray.small = ("FAILED", "/bin/sh: 1: exec: posttrain: not found\n")
    assert main(["launch", "doctor", "--on", profile, "--image"]) == 64
    assert "posttrain: not found" in capsys.readouterr().out
    assert ray.jobs == {}
