"""The process of a local cluster, one for each run: `python -m posttrain.apps.launch.local.process FOLDER`.

It is detached from the command that started it, holds the lock of the folder while it runs, and writes its state to
`state.json`. Commands reach it through files in `requests/`. Values of secrets come through standard input and are
never written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.launch.local import namespaces
from posttrain.apps.launch.local.controllers import Controller, JobController, JobSetController
from posttrain.apps.launch.local.gang_controllers import RayJobController, VolcanoController
from posttrain.apps.launch.local.kubelet import METADATA_ADDRESS, Kubelet
from posttrain.apps.launch.local.metadata_server import Notices, metadata_server
from posttrain.apps.launch.local.pods import Machine, Object, Pod
from posttrain.apps.launch.manifest_files import read_manifests
from posttrain.apps.launch.runs import WORKLOADS
from posttrain.files.locks import try_lock

LOCK, STATE, MANIFESTS, REQUESTS = "lock", "state.json", "manifests.yaml", "requests"
BACKOFF_SCALE = 0.02  # of the delays between restarts: 0.2 s where a cluster waits 10
TICK_S = 0.05


def controller_of(workload: Object, machine: Machine, backoff_scale: float = BACKOFF_SCALE) -> Controller:
    name, spec = workload["metadata"]["name"], workload["spec"]
    kind = (workload["apiVersion"], workload["kind"])
    if kind == WORKLOADS["job"]:
        return JobController(name, spec, machine, backoff_scale=backoff_scale)
    if kind == WORKLOADS["jobset"]:
        return JobSetController(name, spec, machine, backoff_scale)
    if kind == WORKLOADS["volcano"]:
        return VolcanoController(name, spec, machine)
    assert kind == WORKLOADS["rayjob"], kind
    return RayJobController(name, workload["metadata"]["namespace"], spec, machine, backoff_scale)


@dataclass
class LocalRun:
    """The loop: polls pods, answers requests, calls the controller, and writes the state file."""

    folder: Path
    workload: Object
    kubelet: Kubelet
    controller: Controller
    notices: Notices

    def __post_init__(self) -> None:
        self.losses: list[tuple[float, Pod]] = []  # when a machine that was given notice goes
        self.is_stopped = False
        self.written = ""

    def turn(self) -> bool:
        """False: it is over."""
        self.kubelet.poll()
        self._take_requests()
        for when, pod in list(self.losses):
            if time.time() >= when:
                self.losses.remove((when, pod))
                if not pod.is_over:
                    self.kubelet.lose(pod)
        if not self.is_stopped:
            self.controller.reconcile(time.monotonic())
        alive = any(not pod.is_over for pod in self.kubelet.pods)
        self._write()
        return alive or not (self.is_stopped or self.controller.is_over)

    def _take_requests(self) -> None:
        for path in sorted((self.folder / REQUESTS).glob("*.json")):
            request = json.loads(path.read_text())
            path.unlink()
            if request["do"] == "stop":
                self.is_stopped = True
                self.kubelet.note("Stopped", "by a command")
                for pod in self.kubelet.pods:
                    if not pod.is_over:
                        self.kubelet.end(pod)
                continue
            pod = next(pod for pod in self.kubelet.pods if pod.uid == request["pod"])
            if pod.is_over:
                continue
            if request["evict"]:
                self.kubelet.evict(pod)
                continue
            end = time.time() + request["notice_s"]
            if request["notice_s"]:
                self.kubelet.note("Notice", f"pod {pod.name}: its machine ends in {request['notice_s']:g} s")
                self.notices.give(pod.ip, end)
            self.losses.append((end, pod))

    def _write(self) -> None:
        namespace = self.workload["metadata"]["namespace"]
        state = {
            "workload": {**self.workload, "status": self.controller.status()},
            "pods": [pod.as_object(namespace) for pod in self.kubelet.pods],
            "events": self.kubelet.events,
        }
        text = json.dumps(state)
        if text != self.written:
            aside = self.folder / f".{STATE}"
            aside.write_text(text)
            aside.replace(self.folder / STATE)
            self.written = text


def main(folder: Path) -> int:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if not try_lock(lock):
        return 0
    objects = [manifest.body for manifest in read_manifests([folder / MANIFESTS])]
    workload = objects[-1]
    secrets = json.load(sys.stdin)
    if child := namespaces.enter_cluster():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    config_maps = {body["metadata"]["name"]: body for body in objects if body["kind"] == "ConfigMap"}
    kubelet = Kubelet(folder, folder.parents[1] / "claims", config_maps, secrets)
    notices = Notices()
    with metadata_server(notices, METADATA_ADDRESS):
        run = LocalRun(folder, workload, kubelet, controller_of(workload, kubelet), notices)
        while run.turn():
            time.sleep(TICK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
