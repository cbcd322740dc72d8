"""A gang of `posttrain node` processes on this machine, with a scripted driver and a stand-in for Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from posttrain.apps.launch.node.control import port_is_open

SECRET = "5ec" * 21 + "7"
WAIT_S = 60.0  # for things that happen at once; the machine may be busy
DRIVER = """
import json, os, signal, sys, time
folder = {folder!r}
def on_stop(number, frame):
    deadline = json.load(open(os.environ["POSTTRAIN_STOP_FILE"]))["deadline"]
    open(folder + "/stopped", "w").write(str(deadline - time.time()))
    sys.exit(143)
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGUSR1, lambda number, frame: open(folder + "/asked_to_save", "w").write("1"))
open(folder + "/driver", "w").write(os.environ.get("RAY_ADDRESS", "none"))
{rest}
"""
FOREVER = "while True: time.sleep(0.05)"
# Listens where Ray's head would; a worker only waits. Both leave an orphan, which must not outlive the pod.
RAY = f"""#!{sys.executable}
import os, socket, subprocess, sys, time
kind = "head" if "--head" in sys.argv else "worker"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["SCENE"] + "/ray_" + kind, "w").write(" ".join(sys.argv[1:]) + "\\n" + str(child.pid))
if kind == "head":
    port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--port="))
    server = socket.create_server(("127.0.0.1", port))
time.sleep(600)
"""
NODE = """
import sys
from posttrain.apps.launch.node import head
head.driver_command = lambda settings: [sys.executable, {driver!r}]
from posttrain.apps.launch.node import driver
driver.driver_command = head.driver_command
from posttrain.cli.main import main
sys.exit(main(["node", *sys.argv[1:]]))
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Gang:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[object, subprocess.Popen[str]] = {}
        (folder / "bin").mkdir()
        (folder / "bin/ray").write_text(RAY)
        (folder / "bin/ray").chmod(0o755)
        (folder / "node.py").write_text(NODE.format(driver=str(folder / "driver.py")))
        (folder / "config.yaml").write_text(
            f"policy: {{device: cpu}}\ncheckpointing: {{checkpoint_dir: {folder}/run}}\n"
        )
        (folder / "secret").write_text(SECRET + "\n")
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SCENE": str(folder),
            "POSTTRAIN_RUN": "run",
            "POSTTRAIN_KIND": "grpo",
            "POSTTRAIN_CONFIG": str(folder / "config.yaml"),
            "POSTTRAIN_SCHEDULER": "jobset",
            "POSTTRAIN_NUM_NODES": "2",
            "POSTTRAIN_GPUS_PER_NODE": "1",
            "POSTTRAIN_EFA_DEVICES": "0",
            "POSTTRAIN_SHM_GIB": "0",
            "POSTTRAIN_MOUNT": str(folder),
            "POSTTRAIN_HEAD_HOST": "127.0.0.1",
            "POSTTRAIN_RAY_PORT": str(free_port()),
            "POSTTRAIN_CONTROL_PORT": str(free_port()),
            "POSTTRAIN_CONTROL_SECRET_FILE": str(folder / "secret"),
            "POSTTRAIN_GRACE_S": "40",
            "POSTTRAIN_NOTICE": "none",
        }

    def script(self, rest: str) -> None:
        (self.folder / "driver.py").write_text(DRIVER.format(folder=str(self.folder), rest=rest))

    def start(self, *ranks: int, **more: str) -> None:
        for rank in ranks:
            self.run(rank, [], JOB_COMPLETION_INDEX=str(rank), **more)

    def run(self, name: object, words: list[str], **more: str) -> None:
        log = (self.folder / f"{name}.log").open("w")
        self.pods[name] = subprocess.Popen(
            [sys.executable, str(self.folder / "node.py"), *words],
            env={**self.environment, **more},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def control_port(self) -> int:
        """Once rank 0 listens there."""
        port = int(self.environment["POSTTRAIN_CONTROL_PORT"])
        self.until(lambda: port_is_open("127.0.0.1", port), "the control port")
        return port

    def wait_for(self, name: str) -> str:
        """The content of a file of the scene."""
        path = self.folder / name
        self.until(lambda: path.exists() and path.stat().st_size > 0, name)
        return path.read_text()

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"{what} was not seen:\n{self.logs()}")
            time.sleep(0.02)

    def codes(self) -> dict[object, int]:
        return {name: pod.wait(WAIT_S) for name, pod in self.pods.items()}

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def orphans(self) -> list[int]:
        pids = [int(path.read_text().splitlines()[1]) for path in self.folder.glob("ray_*")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def close(self) -> None:
        """A pod that is killed here is not the first process of a container, so what it started lives on."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("SCENE") == str(self.folder):
                with suppress(psutil.Error):
                    process.kill()
        for pod in self.pods.values():
            pod.wait()
