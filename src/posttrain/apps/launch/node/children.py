"""Processes of a member: started, reaped with their orphans, and ended.

PID 1 of a container inherits all orphans and must reap them. If `posttrain node` is not PID 1, it becomes a subreaper
(PR_SET_CHILD_SUBREAPER), so that no process outlives it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_PR_SET_CHILD_SUBREAPER = 36


class Children:
    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        if sys.platform == "linux" and os.getpid() != 1:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        """OSError if the command does not exist. It gets its own session, so that it does not receive signals for this
        process.

        `log` gets its output; None: the output of the pod."""
        with open(log, "wb") if log is not None else nullcontext() as file:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if file is not None else None,
            )
        self._names[process.pid] = name
        self._processes[name] = process

    def is_running(self, name: str) -> bool:
        return name in self._processes

    def signal(self, name: str, number: signal.Signals) -> None:
        if name in self._processes:
            with suppress(ProcessLookupError):
                os.kill(self._processes[name].pid, number)

    def reap(self) -> list[tuple[str, int]]:
        """Reap ended processes. Of the processes that were started here: name and exit code, 128 + N after signal N."""
        ended: list[tuple[str, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if (name := self._names.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._processes.pop(name).returncode = code  # else Popen would wait for it
                ended.append((name, code if code >= 0 else 128 - code))

    def kill_all(self, limit_s: float = 2.0) -> None:
        """Everything below this process. A process that hangs in the kernel ends with the container."""
        end = time.monotonic() + limit_s
        while (below := psutil.Process().children(recursive=True)) and time.monotonic() < end:
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            self.reap()
            time.sleep(0.01)
