"""A run as a job of a long-lived Ray cluster: Ray's Jobs API, which the dashboard serves over HTTP.

A job is shown as a workload with one pod, its driver, so all cluster commands work for it. Config and files are its
working directory, which Ray unpacks on every machine. Jobs are not restarted. Ray itself is not imported.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shlex
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.apps.launch.launch_request import LaunchRequest
from posttrain.apps.launch.pod_template import NODE_COMMAND, RUN_LABEL, Object, labels_of
from posttrain.apps.launch.run_checkpoints import listing_command, run_folders
from posttrain.apps.launch.runs import Check, ClusterUnreachable, name_of
from posttrain.config.cluster_profile import is_http_address
from posttrain.errors import ExitCode, InputError, reason_of
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonObject, parse_json

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"  # Ray's own
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TOKEN_FILE = Path("~/.ray/auth_token")
_CHECKPOINTS, _LOGS = "posttrain.dev/checkpoints", "posttrain.dev/logs"
_GRACE = "RAY_JOB_STOP_WAIT_TIME_S"  # read by Ray; 3 s if it is not set
_ANSWER_S = 60.0
_AGENT_S, _NO_AGENT = 60.0, "No available agent"  # what a head answers whose agent has not started yet, and how long
_SMALL_JOB_LIMIT_S = 600.0
_MAX_POLLS = 30  # between two readings of a long log
_PHASES = {
    "PENDING": "Pending",
    "RUNNING": "Running",
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "STOPPED": "Failed",
}
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_MEANINGS: dict[int, str] = {
    ExitCode.SAVED: ": interrupted. Nothing starts it again: `posttrain launch stop` removes it, and the same launch "
    "resumes it",
    127: ": executable file not found; the image of the Ray cluster needs `posttrain`, see Dockerfile",
}


def render_job(request: LaunchRequest) -> list[Object]:
    """The uploaded package, and the job. The request's files are named relative to the working directory."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:  # the same files give the same bytes
        for path, content in sorted({"config.yaml": request.config_text.encode(), **request.files}.items()):
            archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED)
    package = packed.getvalue()
    name = f"_ray_pkg_{sha256_of(package)[:32]}.zip"
    checkpoints, logs = run_folders(request.config_text)
    variables = {
        **request.profile.env,
        "POSTTRAIN_RUN": request.name,
        "POSTTRAIN_KIND": request.kind,
        "POSTTRAIN_CONFIG": "config.yaml",
        _GRACE: str(request.grace_s),
    }
    job = {
        # Unique: Ray may assign a reused name to the ending actor of the previous job.
        "submission_id": f"{request.name}-{secrets.token_hex(3)}",
        "entrypoint": f"exec {shlex.join([*NODE_COMMAND, 'driver'])}",  # signals reach it, not a shell
        "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": variables},
        "metadata": {**labels_of(request), _CHECKPOINTS: str(checkpoints), _LOGS: str(logs)},
    }
    return [
        {"kind": "package", "metadata": {"name": name}, "content": package},
        {"kind": "Ray job", "metadata": {"name": request.name}, "spec": job},
    ]


class RayJobs:
    poll_s = 2.0

    def __init__(self, address: str | None) -> None:
        self._address = (address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rstrip("/")
        if not is_http_address(self._address):  # the variable's; a profile's is checked
            raise InputError(f"{ADDRESS_VARIABLE}: http://HOST:PORT is accepted, without a user or password")
        self.title = f"the Ray cluster at {self._address}"

    # -- requests ------------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: object = None) -> Any:
        """The answer as JSON. None: it does not exist. `body` is JSON, or bytes."""
        place, token = urlsplit(self._address), _token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None and not isinstance(body, bytes):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        assert place.hostname is not None
        connect = HTTPSConnection if place.scheme == "https" else HTTPConnection
        connection = connect(place.hostname, place.port, timeout=_ANSWER_S)
        try:
            connection.request(method, place.path + path, body, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, HTTPException) as error:
            raise ClusterUnreachable(
                f"{self._address} does not answer ({reason_of(error)}): does the Ray cluster run, and is its port "
                "forwarded (kubectl port-forward service/NAME-head-svc 8265)? scheduler.ray_address of the profile "
                "names another address"
            ) from error
        finally:
            connection.close()
        if status in (401, 403):
            sent = "the one that was sent is another" if token else "none was found here"
            raise ClusterUnreachable(
                f"{self._address} asks for the token of the Ray cluster, and {sent}: set RAY_AUTH_TOKEN, or write it "
                f"to {_TOKEN_FILE}; `ray get-auth-token` prints it on the head"
            )
        if status == 404 and path != "/api/version":
            return None
        if status >= 400:
            raise InputError(f"{method} {self._address}{path}: {status}, {_last_line(text.decode('utf-8', 'replace'))}")
        try:
            return parse_json(text) if text else {}
        except ValueError as error:
            raise InputError(
                f"{self._address}{path} is not an answer of Ray's Jobs API ({error}): the address is that of the "
                "dashboard, port 8265 of the head"
            ) from error

    # -- create --------------------------------------------------------------------------------------------------------

    def examine(self, objects: Sequence[Object]) -> list[Check]:
        version = self._call("GET", "/api/version")
        name = objects[-1]["metadata"]["name"]
        taken = f"{name} exists already: `posttrain launch stop {name} --on PROFILE` removes it, or give --name"
        return [
            Check(f"Jobs API of Ray {version.get('ray_version', '')}"),
            Check(f"no run named {name}", taken if self.workloads(name) else ""),
        ]

    def try_image(self, objects: Sequence[Object]) -> Check:
        problem, _ = self._run_small_job("doctor", ["posttrain", "--version"])
        what = "posttrain in the image of the Ray cluster"
        return Check(what, f"{what} does not start ({problem}): see Dockerfile" if problem else "")

    def create(self, objects: Sequence[Object]) -> None:
        package, job = objects
        path = f"/api/packages/gcs/{package['metadata']['name']}"
        # A request keeps an existing package from being removed for a while: Ray removes those without a job.
        if self._call("GET", path) is None:
            self._call("PUT", path, package["content"])
        self._submit(job["spec"])

    def _submit(self, job: Object) -> None:
        give_up_at = time.monotonic() + _AGENT_S
        while True:
            try:
                self._call("POST", "/api/jobs/", job)
                return
            except ClusterUnreachable:
                with suppress(InputError):  # it may have been accepted before the connection broke
                    self._remove(job["submission_id"], limit_s=0.0)
                raise
            except InputError as error:
                if _NO_AGENT not in str(error) or time.monotonic() >= give_up_at:
                    raise
            time.sleep(self.poll_s)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def workloads(self, name: str | None = None) -> list[Object]:
        jobs = [job for job in self._call("GET", "/api/jobs/") or [] if RUN_LABEL in (job.get("metadata") or {})]
        found = [_workload(job) for job in jobs if job.get("submission_id")]
        return sorted((body for body in found if name in (None, name_of(body), body["metadata"]["name"])), key=name_of)

    def pods(self, workload: Object) -> list[Object]:
        """The driver. The Jobs API does not have the machines of its ranks."""
        return [workload["pod"]]

    def events(self, workload: Object) -> list[str]:
        times = [("started", workload["job"].get("start_time")), ("ended", workload["job"].get("end_time"))]
        return [f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ} {what}" for what, ms in times if ms]

    def log(self, pod: Object, follow: bool) -> Iterator[str]:
        path, known = f"/api/jobs/{pod['metadata']['name']}", 0
        job = self._call("GET", path)  # before the log, so that the last output is not missed
        while True:
            text = str((self._call("GET", f"{path}/logs") or {}).get("logs") or "")
            yield text[known:]
            known = len(text)
            if not follow or _has_ended(job):
                return
            # The API answers with the whole log each time, so a longer one is read less often.
            for _ in range(min(1 + known // 2**20, _MAX_POLLS)):
                time.sleep(self.poll_s)
                job = self._call("GET", path)
                if _has_ended(job):
                    break

    # -- stop and inspect ---------------------------------------------------------------------------------------------

    def delete(self, workload: Object) -> None:
        variables = (workload["job"].get("runtime_env") or {}).get("env_vars") or {}
        self._remove(workload["metadata"]["name"], limit_s=float(variables.get(_GRACE, 3)) + 60)

    def _remove(self, name: str, limit_s: float) -> None:
        """Ray removes only jobs that have ended. A running one gets its grace period for saving."""
        self._call("POST", f"/api/jobs/{name}/stop")
        if self._wait_for_end(name, limit_s) is not None:
            self._call("DELETE", f"/api/jobs/{name}")

    def _wait_for_end(self, name: str, limit_s: float) -> Object | None:
        end = time.monotonic() + limit_s
        while True:
            job: Object | None = self._call("GET", f"/api/jobs/{name}")
            if job is None or job["status"] in _ENDED:
                return job
            if time.monotonic() > end:
                raise InputError(f"job {name} is {job['status'].lower()} after {limit_s:.0f} s: {job.get('message')}")
            time.sleep(self.poll_s)

    def interrupt(self, workload: Object, pod: Object, notice_s: float, evict: bool) -> str:
        raise InputError(
            f"{name_of(workload)} is a job of {self.title}, and has no machines of its own: interrupt those of the "
            "cluster, with the name of the RayCluster and without --on (launch list shows both)"
        )

    def checkpoints(self, workload: Object) -> list[JsonObject]:
        """Read by a small job: the file system is mounted in the cluster only."""
        about = workload["metadata"]["labels"]
        problem, text = self._run_small_job(name_of(workload), listing_command(about[_CHECKPOINTS], about[_LOGS]))
        if problem:
            raise InputError(f"the checkpoints could not be read in the cluster: {problem}")
        for line in reversed(text.splitlines()):  # surrounded by lines of Ray
            with suppress(ValueError):
                if isinstance(rows := parse_json(line), list):
                    return rows
        raise InputError(f"the checkpoints could not be read in the cluster: {_last_line(text) or 'no output'}")

    def _run_small_job(self, name: str, command: Sequence[str]) -> tuple[str, str]:
        """A command on the head. Returns why it failed, and its output."""
        small = f"{name}-look-{time.time_ns() % 10**6:06d}"
        self._submit({"submission_id": small, "entrypoint": f"exec {shlex.join(command)}"})
        try:
            job = self._wait_for_end(small, _SMALL_JOB_LIMIT_S)
            text = "".join(self.log({"metadata": {"name": small}}, follow=False)).strip()
            succeeded = job is not None and job["status"] == "SUCCEEDED"
            return ("" if succeeded else _last_line(text) or "it has ended"), text
        finally:
            with suppress(InputError):
                self._remove(small, limit_s=0.0)


def _has_ended(job: Object | None) -> bool:
    return job is None or job["status"] in _ENDED


def _workload(job: Object) -> Object:
    code, phase = job.get("driver_exit_code"), _PHASES.get(job["status"], "Running")
    metadata = {"name": job["submission_id"], "namespace": "", "labels": dict(job["metadata"])}
    message = ""
    if phase not in ("Pending", "Running", "Succeeded"):
        message = _last_line(job.get("message") or "") if code is None else f"exit code {code}{_MEANINGS.get(code, '')}"
    state = {"terminated": {"exitCode": code, "message": message}} if code is not None else {}
    return {
        "kind": "Ray job",
        "metadata": metadata,
        "job": job,
        "status": {
            "jobDeploymentStatus": {"Pending": "", "Succeeded": "Complete"}.get(phase, phase),
            "message": message,
        },
        "pod": {"metadata": metadata, "status": {"phase": phase, "containerStatuses": [{"state": state}]}},
    }


def _last_line(text: str) -> str:
    """Of a traceback: its error."""
    return next((line.strip() for line in reversed(text.splitlines()) if any(map(str.isalpha, line))), "")


def _token() -> str:
    """As Ray finds it; empty: there is none."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else _TOKEN_FILE.expanduser()
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if named:
            raise InputError(f"RAY_AUTH_TOKEN_PATH={named} cannot be read: {reason_of(error)}") from error
        return ""
