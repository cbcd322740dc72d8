"""This machine as a cluster: runs in folders, each with a process that executes its manifests (process.py).

FOLDER/runs/NAME/    manifests, state, logs of every pod and attempt; removed by `launch stop`
FOLDER/claims/NAME/  mounted as a claim in pods: contains checkpoints, and is kept
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from posttrain.apps.launch.local import namespaces
from posttrain.apps.launch.local.kubelet import ip_command
from posttrain.apps.launch.local.process import LOCK, MANIFESTS, REQUESTS, STATE
from posttrain.apps.launch.manifest_files import read_manifests, to_yaml
from posttrain.apps.launch.pod_template import RUN_LABEL, Object, new_secret
from posttrain.apps.launch.run_checkpoints import checkpoint_rows, run_folders, shared_mount
from posttrain.apps.launch.runs import ENDED, Check, state_of
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.json_files import JsonObject

FOLDER_VARIABLE = "POSTTRAIN_LOCAL"
_START_LIMIT_S = 60.0
_POLL_S = 0.1
_SHIM = """#!{python}
import sys
from posttrain.cli.main import main
sys.exit(main())
"""


def local_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.environ.get(FOLDER_VARIABLE) or f"{state}/posttrain/local").expanduser().absolute()


def claim_folder(claim: str) -> Path:
    return local_folder() / "claims" / claim


def why_impossible() -> str | None:
    """Why pods cannot be made on this machine; None: they can."""
    if sys.platform != "linux":
        return (
            f"pods are made of Linux namespaces, and this is {sys.platform}; use a Linux machine, or a profile of a "
            "cluster"
        )
    if ip_command() is None:
        return "the program `ip` is missing, which connects pods: install the package iproute2"
    for path in (sys.prefix, __file__):
        if Path(path).resolve().is_relative_to("/tmp"):
            return f"a pod has a /tmp of its own, and would not find {path}: install posttrain outside of /tmp"
    probe = [sys.executable, "-I", "-S", namespaces.__file__, "probe"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (
        f"this kernel, or the container around this process, does not let users make namespaces ({reason}). Where it "
        "may be changed: sysctl user.max_user_namespaces=10000, kernel.unprivileged_userns_clone=1 (Debian), "
        "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker --security-opt seccomp=unconfined"
    )


class LocalCluster:
    title = "local"
    poll_s = 0.2

    def __init__(self) -> None:
        self._runs = local_folder() / "runs"

    def examine(self, objects: Sequence[Object]) -> list[Check]:
        checks = [Check("namespaces of Linux", why_impossible() or "")]
        for name in _secret_names(objects):
            problem = f"secrets.{name}: on this machine its value is that of the environment variable {name}: set it"
            checks.append(Check(f"secret {name}", "" if os.environ.get(name) else problem))
        return checks

    def try_image(self, objects: Sequence[Object]) -> Check:
        return Check("image: this machine")

    def create(self, objects: Sequence[Object]) -> None:
        name = objects[-1]["metadata"]["labels"][RUN_LABEL]
        folder = self._runs / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise InputError(
                f"{name}: a run of this name is on this machine; `posttrain launch stop {name}` removes it, or "
                "give --name"
            ) from None
        try:
            (folder / REQUESTS).mkdir()
            (folder / MANIFESTS).write_text(to_yaml(objects), encoding="utf-8")
            shim = folder / "bin" / "posttrain"  # pods use that of this Python, even if it is not installed
            shim.parent.mkdir()
            shim.write_text(_SHIM.format(python=sys.executable))
            shim.chmod(shim.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            values = {name: os.environ[name] for name in _secret_names(objects)}
            # Keys of the Secrets that pods mount, each with the name of its Secret. Launch makes their values.
            mounted = [one["secret"] for one in _maps_in(list(objects)) if isinstance(one.get("secret"), dict)]
            files = sorted({f"{one['secretName']}/{item['key']}" for one in mounted for item in one["items"]})
            self._start(folder, values | {name: new_secret() for name in files})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _start(self, folder: Path, secrets: dict[str, str]) -> None:
        env = {name: value for name, value in os.environ.items() if name not in secrets}  # others may see it in /proc
        if paths := os.environ.get("PYTHONPATH"):  # pods have another working directory
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
        with (folder / "process.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "posttrain.apps.launch.local.process", str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a closed terminal, or Ctrl-C, does not reach it
                env=env,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(secrets).encode())
        end = time.monotonic() + _START_LIMIT_S
        while not (folder / STATE).exists():
            if (code := process.poll()) is not None or time.monotonic() > end:
                process.kill()
                said = (folder / "process.log").read_text(errors="replace").strip().splitlines()
                raise InputError(f"the local cluster did not start ({said[-1] if said else f'exit code {code}'})")
            time.sleep(_POLL_S / 2)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def workloads(self, name: str | None = None) -> list[Object]:
        names = [name] if name is not None else sorted(path.name for path in self._runs.glob("*"))
        found = []
        for one in names:
            was_alive = self._is_alive(one)  # before its last state is read
            if (state := self._state(one)) is None:
                continue
            workload = state["workload"]
            if not was_alive and state_of(workload).phase not in ENDED:
                said = (self._runs / one / "process.log").read_text(errors="replace").strip().splitlines()
                workload["posttrainLost"] = said[-1] if said else "a kill, or a restart of this machine"
            found.append(workload)
        return found

    def _state(self, name: str) -> JsonObject | None:
        try:
            found: JsonObject = json.loads((self._runs / name / STATE).read_text())
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _is_alive(self, name: str) -> bool:
        try:
            with (self._runs / name / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look at the same time
            return False
        except BlockingIOError:
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _state_of(self, workload: Object) -> JsonObject:
        return self._state(workload["metadata"]["name"]) or {"pods": [], "events": []}

    def pods(self, workload: Object) -> list[Object]:
        return list(self._state_of(workload)["pods"])

    def events(self, workload: Object) -> list[str]:
        return [f"{one['time']} {one['reason']}: {one['message']}" for one in self._state_of(workload)["events"]]

    def log(self, pod: Object, follow: bool) -> Iterator[str]:
        name = pod["metadata"]["labels"][RUN_LABEL]
        with (self._runs / name / "logs" / f"{pod['metadata']['uid']}.log").open(errors="replace") as file:
            while True:
                was_over = not follow or self._is_over(name, pod["metadata"]["uid"])  # before the last read
                while text := file.read(1 << 16):
                    yield text
                if was_over:
                    return
                time.sleep(_POLL_S)

    def _is_over(self, name: str, uid: str) -> bool:
        pods = (self._state(name) or {"pods": []})["pods"]
        phases = [pod["status"]["phase"] for pod in pods if pod["metadata"]["uid"] == uid]
        return not phases or phases[0] in ENDED or not self._is_alive(name)

    # -- what is asked for ---------------------------------------------------------------------------------------------

    def delete(self, workload: Object) -> None:
        """Stops pods with their grace period; then removes everything except the claim."""
        name = workload["metadata"]["name"]
        folder = self._runs / name
        if self._is_alive(name):
            self._ask(name, {"do": "stop"})
            while self._is_alive(name):
                time.sleep(_POLL_S)
        shutil.rmtree(folder)

    def interrupt(self, workload: Object, pod: Object, notice_s: float, evict: bool) -> str:
        request = {"do": "interrupt", "pod": pod["metadata"]["uid"], "notice_s": notice_s, "evict": evict}
        self._ask(workload["metadata"]["name"], request)
        if evict:
            return "SIGTERM now, SIGKILL when the grace period is over"
        if not notice_s:
            return "SIGKILL now: the machine is lost without notice"
        return f"the metadata service announces the end of the machine; SIGKILL in {notice_s:g} s"

    def _ask(self, name: str, request: JsonObject) -> None:
        folder = self._runs / name / REQUESTS
        durable.write_text(folder / f"{time.time_ns()}.json", json.dumps(request))

    def checkpoints(self, workload: Object) -> list[JsonObject]:
        objects = [one.body for one in read_manifests([self._runs / workload["metadata"]["name"] / MANIFESTS])]
        mount, claim = shared_mount(workload)
        folders = run_folders(objects[0]["data"]["config.yaml"])
        return checkpoint_rows(*(claim_folder(claim) / folder.relative_to(mount) for folder in folders))


def _secret_names(objects: Sequence[Object]) -> list[str]:
    """Variables whose values are in Secrets."""
    return sorted({one["name"] for one in _maps_in(list(objects)) if "secretKeyRef" in (one.get("valueFrom") or {})})


def _maps_in(value: object) -> Iterator[Object]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _maps_in(inner)
