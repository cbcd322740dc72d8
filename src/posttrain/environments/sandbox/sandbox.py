"""Runs untrusted programs: the side of the caller.

It starts `launch.py`, feeds it, reads every pipe without ever blocking, keeps the limits that the kernel does not keep
by itself (time, output, the memory and the number of all processes together), and tells apart what is the program's
fault, an `Outcome`, from what is the sandbox's, a `SandboxFailure`. Independent of the program's purpose.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.environments.sandbox.processes import descendants, memory_bytes, num_processes_of_user
from posttrain.environments.sandbox.program import READY, Level, Limits, Outcome, Program, SandboxFailure, Stopped
from posttrain.files.json_files import JsonObject

_LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from posttrain.environments.sandbox.launch import launch; "
_LAUNCH += "launch(*map(int, sys.argv[2:]))"
_SOURCES = str(Path(__file__).resolve().parents[3])
_START_LIMIT_S = 60.0  # for a machine that is very busy; the program's own time starts afterwards
_END_LIMIT_S = 15.0
_LOOK_EVERY_S = 0.03
_MAX_REPORT_BYTES = 4 << 20
_OWN_PROCESSES = 2  # the launcher's child in front of the program, and one that is just ending


@dataclass(frozen=True)
class Sandbox:
    """Runs programs at one level of protection. `read_only` is what they see of the machine, besides their own
    folder."""

    level: Level
    read_only: tuple[str, ...] = ()

    def run(self, program: Program, limits: Limits) -> Outcome:
        """The outcome of the program. Raises `SandboxFailure` if it is not known."""
        if self.level == "namespaces":
            return _Run(self, program, limits, folder=None).outcome()
        with contextlib.ExitStack() as cleanup:
            folder = tempfile.mkdtemp(prefix="posttrain-sandbox-")
            cleanup.callback(_remove, folder)
            return _Run(self, program, limits, folder).outcome()


class _Run:
    """One run, from the start of the launcher until nothing of it is left."""

    def __init__(self, sandbox: Sandbox, program: Program, limits: Limits, folder: str | None) -> None:
        self.program = program
        self.limits = limits
        self.level = sandbox.level
        self.stopped: Stopped | None = None
        self.running_since: float | None = None
        self.texts: dict[str, bytearray] = {name: bytearray() for name in ("stdout", "stderr", "report", "status")}
        self._names: dict[int, str] = {}
        self._stop_sent_at: float | None = None
        spec = {
            "parent": os.getpid(),
            "level": sandbox.level,
            "command": list(program.command),
            "environment": _environment("/box" if folder is None else folder),
            "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
            "limits": asdict(limits),
            "read_only": list(sandbox.read_only),
            "folder": folder,
            "num_processes_of_user": num_processes_of_user(os.getuid()) if os.geteuid() != 0 else 0,
        }
        self._start(json.dumps(spec).encode())

    def _start(self, spec: bytes) -> None:
        theirs: dict[str, int] = {}
        inputs = [_memory_file("spec", spec), _memory_file("stdin", self.program.stdin)]
        try:
            for name in self.texts:
                ours, theirs[name] = os.pipe()
                os.set_blocking(ours, False)
                self._names[ours] = name
            arguments = [_SOURCES, str(inputs[0]), str(theirs["status"]), str(theirs["report"])]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, *arguments],
                stdin=inputs[1],
                stdout=theirs["stdout"],
                stderr=theirs["stderr"],
                pass_fds=(inputs[0], theirs["status"], theirs["report"]),
                env={},
                cwd="/",
                start_new_session=True,  # a kill of our process group must not kill the launcher, which cleans up
            )
        except OSError as error:
            self._close()
            raise SandboxFailure(f"the launcher could not be started: {error}") from error
        finally:
            for fd in (*inputs, *theirs.values()):
                os.close(fd)

    def outcome(self) -> Outcome:
        started_at = time.monotonic()
        try:
            while self._names:
                self._read(_LOOK_EVERY_S)
                self._look(started_at)
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SandboxFailure("the launcher did not end") from None
        finally:
            ended_at = time.monotonic()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._close()
        return self._verdict(ended_at)

    def _read(self, wait_s: float) -> None:
        poll = select.poll()
        for fd in self._names:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(wait_s * 1000):
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 1 << 16)
                if not data:
                    os.close(fd)
                    del self._names[fd]
                elif self.stopped is None:
                    self.texts[self._names[fd]] += data  # output of a program that is being stopped is ignored

    def _look(self, started_at: float) -> None:
        """Check that it has started and is within its limits."""
        now = time.monotonic()
        if self._stop_sent_at is not None:
            if now > self._stop_sent_at + _END_LIMIT_S:
                raise SandboxFailure(f"a program that was {self._why()} could not be ended")
            return
        if self.running_since is None:
            announced = not self.program.announces or self.texts["report"].startswith(READY)
            if announced and b"started" in self.texts["status"]:
                self.running_since = now
            elif now > started_at + _START_LIMIT_S:
                self._stop()
                raise SandboxFailure(f"the program had not started after {_START_LIMIT_S:g} s")
            return
        self.stopped = self._exceeded(now - self.running_since)
        if self.stopped is not None:
            self._stop()

    def _exceeded(self, wall_s: float) -> Stopped | None:
        if len(self.texts["stdout"]) + len(self.texts["stderr"]) > self.limits.max_output_bytes:
            return "output"
        if len(self.texts["report"]) > _MAX_REPORT_BYTES:
            return "output"
        if b"exit_code" in self.texts["status"]:
            return None  # it has ended: only remaining output is read
        if wall_s > self.limits.wall_s:
            return "wall time"
        running = descendants(self.process.pid)
        if len(running) > self.limits.max_processes + _OWN_PROCESSES:
            return "processes"
        if self.level == "namespaces":
            running = running[1:]  # without the process in front of the program, whose files we may not be able to list
        limit = self.limits.max_memory_bytes
        # Twice: a process may fork while its pages are counted, which then count in full and shared with the other.
        if memory_bytes(running, limit) > limit and memory_bytes(running, limit) > limit:
            return "memory"
        return None

    def _stop(self) -> None:
        self._stop_sent_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)  # the launcher ends what it started, then itself

    def _why(self) -> str:
        return f"over the limit of {self.stopped}"

    def _verdict(self, ended_at: float) -> Outcome:
        status = self._status()
        report = bytes(self.texts["report"])
        if "error" in status:
            raise SandboxFailure(f"the sandbox could not be set up: {status['error']}")
        if not status.get("started"):
            raise SandboxFailure(f"the launcher ended with code {self.process.returncode}{self._last_words()}")
        if self.program.announces and not report.startswith(READY):
            raise SandboxFailure(f"the interpreter did not start in the sandbox{self._last_words()}")
        exit_code = status.get("exit_code")
        if exit_code is None and self.stopped is None:
            raise SandboxFailure(f"the sandbox ended with code {self.process.returncode}, before the program did")
        stopped = self.stopped
        if exit_code is not None and stopped is None and self._ran_out_of_cpu_time(status):
            stopped, exit_code = "cpu time", None
        return Outcome(
            exit_code=None if stopped else exit_code,
            stopped=stopped,
            stdout=bytes(self.texts["stdout"][: self.limits.max_output_bytes]),
            stderr=bytes(self.texts["stderr"][: self.limits.max_output_bytes]),
            report=report[len(READY) :] if self.program.announces else report,
            wall_s=ended_at - (self.running_since or ended_at),
            cpu_s=float(status.get("cpu_s", 0.0)),
        )

    def _ran_out_of_cpu_time(self, status: JsonObject) -> bool:
        ended_by = -int(status["exit_code"])
        used = float(status["program_cpu_s"]) >= self.limits.cpu_s - 0.1
        return ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and used)

    def _status(self) -> JsonObject:
        status: JsonObject = {}
        for line in self.texts["status"].splitlines():
            with contextlib.suppress(ValueError):
                status |= json.loads(line)
        return status

    def _last_words(self) -> str:
        text = " ".join(self.texts["stderr"].decode("utf-8", "replace").split())
        return f": {text[-600:]}" if text else ""

    def _close(self) -> None:
        for fd in self._names:
            os.close(fd)
        self._names.clear()


def _environment(home: str) -> dict[str, str]:
    """The program's environment variables, independent of ours."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _memory_file(name: str, content: bytes) -> int:
    """A file in memory, at its beginning, that cannot be changed: it cannot block, and it leaves nothing on the
    disk."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove(folder: str) -> None:
    """Remove a folder in which the program may have changed permissions or created links to other folders."""
    for place, inner, _ in os.walk(folder):
        for name in inner:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
