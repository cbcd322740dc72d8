"""Runs pods of a manifest on this machine, in namespaces on a private network. Runs inside those of the local cluster.

Supported parts of a manifest: command, environment, ConfigMaps, Secrets, the claim, memory-backed and other empty
volumes, a read-only root, host name, DNS names, grace period, user 1000. Limits of CPU and memory are not enforced, and
there are no GPUs. The image is replaced by this machine's file system and this Python's `posttrain`.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.launch.local import namespaces
from posttrain.apps.launch.local.pods import Object, Pod, as_time
from posttrain.apps.launch.quantities import quantity

GATEWAY = "10.88.0.1"
METADATA_ADDRESS = "169.254.169.254"
_OF_THE_IMAGE = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
MAX_EVENTS = 1000


def _folder_mount(path: str, source: Path, *, read_only: bool = False) -> namespaces.Mount:
    return {"path": path, "source": str(source), "size": 0, "read_only": read_only, "files": {}}


def ip_command() -> str | None:
    return shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class _Process:
    outer: subprocess.Popen[bytes]
    first: int  # PID of the pod's first process, seen from here
    handle: int  # pidfd of that process: a PID can be reused
    report: int  # at its end when the command has begun
    kill_at: float | None = None


class Kubelet:
    """`folder` is that of the run. `config_maps` are the manifests of that kind, `secrets` the values of environment
    variables by name, and of files by SECRET/KEY."""

    def __init__(
        self,
        folder: Path,
        claims: Path,
        config_maps: Mapping[str, Object],
        secrets: Mapping[str, str],
        address: str = METADATA_ADDRESS,
    ) -> None:
        self.pods: list[Pod] = []
        self.events: list[Object] = []
        self._folder, self._claims = folder, claims
        self._config_maps, self._secrets = config_maps, secrets
        self._processes: dict[str, _Process] = {}
        found = ip_command()
        assert found is not None  # asked before the cluster is started
        self._ip = found
        for name in ("pods", "logs", "dns"):
            (folder / name).mkdir(exist_ok=True)
        self._write_hosts()
        self._call_ip(
            "link set lo up\n"
            "link add br0 type bridge\n"
            f"addr add {GATEWAY}/16 dev br0\n"
            f"addr add {address}/32 dev br0\n"
            "link set br0 up\n"
            "route add unreachable default\n"
        )
        with suppress(OSError):  # so that connections to other hosts fail immediately instead of timing out
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _call_ip(self, batch: str) -> None:
        subprocess.run([self._ip, "-batch", "-"], input=batch, text=True, check=True)

    def note(self, reason: str, message: str) -> None:
        self.events.append({"time": as_time(time.time()), "reason": reason, "message": message})
        del self.events[:-MAX_EVENTS]

    # -- start ---------------------------------------------------------------------------------------------------------

    def start(self, pod: Pod) -> None:
        number = len(self.pods) + 1
        pod.uid, pod.created = f"{number:04d}-{pod.name}", time.time()
        pod.ip = f"10.88.{1 + number // 250}.{1 + number % 250}"
        self.pods.append(pod)
        spec = self._description(pod)
        self._write_hosts()
        reading, writing = os.pipe()
        with self.log_of(pod).open("ab") as log:
            outer = subprocess.Popen(
                [sys.executable, "-I", "-S", namespaces.__file__, "pod", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
            )
        os.close(writing)
        first = os.read(reading, 32).decode().strip()
        assert outer.stdin is not None
        if not first:
            os.close(reading)
            outer.stdin.close()
            self._on_end(pod, outer.wait())
            return
        veth = f"v{number}"
        self._call_ip(
            f"link add {veth} type veth peer name eth0 netns {first}\nlink set {veth} master br0\nlink set {veth} up\n"
        )
        os.set_blocking(reading, False)
        self._processes[pod.uid] = _Process(outer, int(first), os.pidfd_open(int(first)), reading)
        outer.stdin.write(json.dumps(spec).encode())  # the pod waits for it, so its network is there when it starts
        outer.stdin.close()

    def log_of(self, pod: Pod) -> Path:
        return self._folder / "logs" / f"{pod.uid}.log"

    def _description(self, pod: Pod) -> namespaces.PodSpec:
        container = pod.template["spec"]["containers"][0]
        folder = self._folder / "pods" / pod.uid
        (folder / "root").mkdir(parents=True)
        # The hub's cache of this machine: pods use it in place of one on the claim, and write to it.
        caches = [Path(one["value"]) for one in container.get("env", []) if one["name"] == "HF_HOME"][:1]
        return {
            "ip_command": self._ip,
            "network": f"link set lo up\naddr add {pod.ip}/16 dev eth0\nlink set eth0 up\n"
            f"route add default via {GATEWAY}\n",
            "hostname": pod.hostname,
            "root": str(folder / "root"),
            "read_only_root": bool(container.get("securityContext", {}).get("readOnlyRootFilesystem")),
            "mounts": [
                _folder_mount("/etc/cluster-dns", self._folder / "dns", read_only=True),
                *(_folder_mount(str(path), path) for path in caches if path.is_dir()),
                *self._mounts(pod, container, folder),
            ],
            "links": {"/etc/hosts": "/etc/cluster-dns/hosts", "/etc/resolv.conf": "/etc/cluster-dns/resolv.conf"},
            "command": [*container.get("command", []), *container.get("args", [])],
            "env": self._environment(pod, container),
            "folder": container.get("workingDir", "/"),
        }

    def _environment(self, pod: Pod, container: Object) -> dict[str, str]:
        env = {name: os.environ[name] for name in _OF_THE_IMAGE if name in os.environ}
        env["PATH"] = f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
        env |= {**_NO_GPUS, "HOSTNAME": pod.hostname, **pod.env}
        for one in container.get("env", []):
            if "value" in one:
                env[one["name"]] = one["value"]
            else:
                env[one["name"]] = self._secrets[one["name"]]
        return env

    def _mounts(self, pod: Pod, container: Object, folder: Path) -> list[namespaces.Mount]:
        volumes = {volume["name"]: volume for volume in pod.template["spec"].get("volumes", [])}
        mounts: list[namespaces.Mount] = []
        for one in container.get("volumeMounts", []):
            volume = volumes[one["name"]]
            mount: namespaces.Mount = {
                "path": one["mountPath"],
                "source": None,
                "size": 0,
                "read_only": bool(one.get("readOnly")),
                "files": {},
            }
            if "configMap" in volume:
                mount["source"] = str(self._write_config(volume["configMap"], folder / one["name"]))
                mount["read_only"] = True
            elif "persistentVolumeClaim" in volume:
                claim = self._claims / volume["persistentVolumeClaim"]["claimName"]
                claim.mkdir(parents=True, exist_ok=True)
                mount["source"] = str(claim)
            elif "secret" in volume:  # in memory, as a kubelet keeps it
                secret = volume["secret"]
                mount["size"], mount["read_only"] = 2**16, True
                mount["files"] = {
                    item["path"]: self._secrets[f"{secret['secretName']}/{item['key']}"] for item in secret["items"]
                }
            elif "hostPath" in volume:
                mount["source"] = volume["hostPath"]["path"]
            elif volume["emptyDir"].get("medium") == "Memory":
                size = quantity(volume["emptyDir"].get("sizeLimit", "1Gi"))
                assert size is not None  # the lint refuses other forms
                mount["size"] = int(size)
            else:
                empty = folder / one["name"]
                empty.mkdir(mode=0o777)
                mount["source"] = str(empty)
            mounts.append(mount)
        return mounts

    def _write_config(self, volume: Object, folder: Path) -> Path:
        body = self._config_maps[volume["name"]]
        contents = {key: text.encode() for key, text in body.get("data", {}).items()}
        contents |= {key: base64.b64decode(text) for key, text in body.get("binaryData", {}).items()}
        for item in volume.get("items", [{"key": key, "path": key} for key in contents]):
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[item["key"]])
        return folder

    def _write_hosts(self) -> None:
        """DNS of the running pods. A rename, so that a reader sees the old file or the new one."""
        lines = ["127.0.0.1 localhost", f"{METADATA_ADDRESS} metadata.google.internal metadata"]
        lines += [
            f"{pod.ip} {' '.join((*pod.aliases, pod.hostname))}" for pod in reversed(self.pods) if not pod.is_over
        ]
        aside = self._folder / "dns" / ".hosts"
        aside.write_text("\n".join(lines) + "\n")
        aside.replace(self._folder / "dns" / "hosts")
        (self._folder / "dns" / "resolv.conf").write_text("# names are in hosts\n")

    # -- end -----------------------------------------------------------------------------------------------------------

    def end(self, pod: Pod) -> None:
        if not pod.is_deleted:
            pod.is_deleted = True
            self._terminate(pod, pod.grace_s)

    def evict(self, pod: Pod, grace_s: float | None = None) -> None:
        """SIGTERM to a pod that is removed from its machine."""
        pod.is_disrupted = True
        self.note("Evicted", f"pod {pod.name}")
        self._terminate(pod, pod.grace_s if grace_s is None else min(grace_s, pod.grace_s))

    def lose(self, pod: Pod) -> None:
        """The machine is lost: processes get no signal that they could handle."""
        pod.is_disrupted = True
        self.note("MachineLost", f"pod {pod.name}")
        self._signal(pod, signal.SIGKILL)

    def _terminate(self, pod: Pod, grace_s: float) -> None:
        if (process := self._processes.get(pod.uid)) is not None:
            kill_at = time.monotonic() + grace_s
            process.kill_at = kill_at if process.kill_at is None else min(kill_at, process.kill_at)
            self._signal(pod, signal.SIGTERM)

    def _signal(self, pod: Pod, number: int) -> None:
        if (process := self._processes.get(pod.uid)) is not None:
            with suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(process.handle, number)

    def poll(self) -> None:
        """Record pods that started or ended, and kill those whose grace period is over."""
        for pod in self.pods:
            if (process := self._processes.get(pod.uid)) is None:
                continue
            if pod.phase == "Pending" and self._has_begun(process):
                pod.phase = "Running"
                self.note("Started", f"pod {pod.name} ({pod.ip})")
            if (code := process.outer.poll()) is not None:
                del self._processes[pod.uid]
                os.close(process.report)
                os.close(process.handle)
                self._on_end(pod, code)
            elif process.kill_at is not None and time.monotonic() >= process.kill_at:
                process.kill_at = float("inf")
                self.note("Killed", f"pod {pod.name}: its grace period is over")
                self._signal(pod, signal.SIGKILL)

    def _has_begun(self, process: _Process) -> bool:
        try:
            return os.read(process.report, 1) == b""
        except BlockingIOError:
            return False

    def _on_end(self, pod: Pod, code: int) -> None:
        pod.exit_code, pod.finished = code, time.time()
        pod.phase = "Succeeded" if code == 0 else "Failed"
        self.note("Ended", f"pod {pod.name}: exit code {code}")
        self._write_hosts()
        shutil.rmtree(self._folder / "pods" / pod.uid, ignore_errors=True)

    # -- more in a pod -------------------------------------------------------------------------------------------------

    def begin_command(self, pod: Pod, command: str) -> subprocess.Popen[bytes]:
        """As a job that Ray's dashboard starts on the head: with the pod's environment, its output in the pod's log."""
        container = pod.template["spec"]["containers"][0]
        spec: namespaces.CommandSpec = {
            "command": shlex.split(command),
            "env": self._environment(pod, container),
            "folder": container.get("workingDir", "/"),
        }
        with self.log_of(pod).open("ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    namespaces.__file__,
                    "enter",
                    str(self._processes[pod.uid].first),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec).encode())
        process.stdin.close()
        self.note("Submitted", f"{command} in pod {pod.name}")
        return process
