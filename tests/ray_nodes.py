"""A Ray cluster of several nodes on this machine, made with `ray start` as on several machines, and always taken down.

The cluster has a temp dir of its own, which plays Ray's default one for processes that are given `environment`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LIMIT_S = 120.0
_RAY = Path(sys.executable).parent / "ray"
_SOURCES = Path(__file__).parents[1] / "src"
_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class RayNodes:
    """`environment` is what a user of this machine has; `token` is in the file where Ray looks for it."""

    def __init__(self, token: str | None = None, *, cpus_per_node: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pt", dir="/tmp"))  # short: it holds the paths of sockets
        self.environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        self.environment |= {
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(_SOURCES),
            "OMP_NUM_THREADS": "1",
        }
        self._for_nodes = dict(self.environment)
        if token is not None:
            (self.folder / ".ray").mkdir()
            (self.folder / ".ray" / "auth_token").write_text(token)
            self._for_nodes["RAY_AUTH_MODE"] = "token"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.cpus_per_node = cpus_per_node
        self.address = ""

    @property
    def record(self) -> Path:
        """The file in which `ray start` leaves the address of the cluster."""
        return self.folder / "ray" / "ray_current_cluster"

    def start_head(self, *, cpus: int | None = None) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self._start("--head", f"--port={port}", "--include-dashboard=false", cpus=cpus)
        self._wait_for(self.record.is_file)
        self.address = self.record.read_text().strip()

    def add_node(self) -> None:
        # Another IP than the head's, so that drivers, which look for a node with theirs, find the head.
        self._start(f"--address={self.address}", f"--node-ip-address=127.0.0.{1 + self.num_nodes}")

    @property
    def num_nodes(self) -> int:
        """That were started."""
        return len(self._processes)

    def kill_newest_node(self) -> None:
        """With all that runs on it, as when a machine is lost."""
        _kill(_with_descendants(self._processes[-1].pid))

    def kill_node_of(self, pid: int) -> None:
        """The one on which this process runs."""
        nodes = [_with_descendants(process.pid) for process in self._processes]
        _kill(next(node for node in nodes if pid in node))

    def _start(self, *arguments: str, cpus: int | None = None) -> None:
        sizes = [
            f"--num-cpus={self.cpus_per_node if cpus is None else cpus}",
            "--num-gpus=0",
            "--object-store-memory=80000000",
            "--block",
        ]
        with (self.folder / f"node{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [_RAY, "start", *arguments, *sizes], env=self._for_nodes, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def _wait_for(self, condition: object) -> None:
        assert callable(condition)
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self._processes[-1].poll() is None, self.logs()
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("node*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        for pid in self._left_over():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _left_over(self) -> list[int]:
        """Processes of this cluster: its folder is in their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.folder).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has already ended
        return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _with_descendants(root: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found
