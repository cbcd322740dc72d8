"""Commands of posttrain in processes of their own: forked from one that has imported everything, or started as a user
does.

Forked ones are there a moment later instead of six seconds. Each is the leader of a session, so that all of it can be
killed.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

FORKED = "forked\n"
PRELOADED = [
    "tiny_runs",
    "posttrain.build",
    "posttrain.apps.export.convert",
    "posttrain.apps.evaluate.build",
    "posttrain.apps.ship.pipeline.runner",
    "mlflow",
    "transformers.models.llama.modeling_llama",
]
DEFAULT_LIMIT_S = 180.0
CHANGES = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.truncate",
}  # of CPython's audit events


@dataclass(frozen=True)
class Finished:
    code: int  # negative: the signal that ended it
    output: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"exit code {self.code}; output:\n{self.output}"


@dataclass(frozen=True)
class Surroundings:
    """What a forked process finds. It crosses to the process by pickle."""

    environment: Mapping[str, str] = field(default_factory=dict)
    max_file_bytes: int | None = None
    extra_memory_bytes: int | None = None  # address space beyond what the process has when it starts
    folder: Path | None = None
    hold: Path | None = None  # while this file exists, no checkpoint gets the name that it has when it is complete
    trace: Path | None = None  # gets a line for each change of files: see `watch_changes`
    die_at: tuple[str, int] | None = None  # kill -9 just before the n-th change whose line this expression matches
    die_in: tuple[str, int] | None = None  # kill -9 in the n-th call of this: package.module:Class.method


@dataclass
class Running:
    process: BaseProcess
    log: Path
    started: float

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace").removeprefix(FORKED)

    def wait_for(self, condition: Callable[[], Any], limit_s: float = DEFAULT_LIMIT_S) -> bool:
        """Whether it came true while the process lived."""
        end = time.monotonic() + limit_s
        while self.process.is_alive():
            if condition():
                return True
            if time.monotonic() > end:
                self.kill_all()
                raise AssertionError(f"no progress within {limit_s:g} s; output:\n{self.output()}")
            time.sleep(0.002)
        return bool(condition())

    def kill_all(self) -> None:
        """The process and everything that it started, all at once."""
        victims = descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        kill(victims)
        self.process.join()

    def finish(self, limit_s: float = DEFAULT_LIMIT_S) -> Finished:
        self.process.join(limit_s)
        if self.process.is_alive():
            self.kill_all()
            raise AssertionError(f"still running after {limit_s:g} s; output:\n{self.output()}")
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has left behind
        assert self.process.exitcode is not None
        return Finished(self.process.exitcode, self.output(), time.monotonic() - self.started)


@functools.cache
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    tests = str(Path(__file__).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if tests not in paths:  # the server that forks imports by this path only
        os.environ["PYTHONPATH"] = os.pathsep.join([tests, *(path for path in paths if path)])
    found.set_forkserver_preload(PRELOADED)
    return found


def begin(arguments: Sequence[str], log: Path, surroundings: Surroundings | None = None) -> Running:
    return begin_function(_command, (list(arguments), surroundings or Surroundings()), log)


def begin_function(function: Callable[..., int], arguments: tuple[Any, ...], log: Path) -> Running:
    """Any function, in a forked process whose output goes to `log`; it returns the exit code."""
    log.write_text("")
    started = time.monotonic()
    process: BaseProcess = context().Process(target=_forked, args=(str(log), function, arguments))
    process.start()
    running = Running(process, log, started)
    assert running.wait_for(lambda: log.read_text(errors="replace").startswith(FORKED)), "the process did not start"
    return running


def run(
    arguments: Sequence[str],
    log: Path,
    surroundings: Surroundings | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
) -> Finished:
    return begin(arguments, log, surroundings).finish(limit_s)


def run_as_user(
    arguments: Sequence[str], limit_s: float = DEFAULT_LIMIT_S, shell: str = '"$@"', **environment: str
) -> Finished:
    """A new interpreter, started by `shell`: a script whose "$@" is the command."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-m", "posttrain.cli.main", *arguments]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {limit_s:g} s; output:\n{output.decode(errors='replace')}") from None
    return Finished(process.returncode, output.decode(errors="replace"), time.monotonic() - started)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(victims: Sequence[psutil.Process]) -> None:
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()


def wait_until_gone(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that are still there, and not as zombies."""
    end = time.monotonic() + limit_s
    while True:
        left = [one for one in processes if _lives(one)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _forked(log: str, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.setsid()
    os.write(1, FORKED.encode())
    sys.exit(function(*arguments))


def _command(arguments: list[str], surroundings: Surroundings) -> int:
    from posttrain.cli.main import main

    os.environ.update(surroundings.environment)
    if surroundings.folder is not None:
        os.chdir(surroundings.folder)
    if surroundings.hold is not None:
        _hold_checkpoints(surroundings.hold)
    if surroundings.die_in is not None:
        _die_in(*surroundings.die_in)
    if surroundings.trace is not None or surroundings.die_at is not None:
        watch_changes(surroundings.trace, surroundings.die_at)
    if surroundings.max_file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as every Python has it
        resource.setrlimit(resource.RLIMIT_FSIZE, (surroundings.max_file_bytes, surroundings.max_file_bytes))
    if surroundings.extra_memory_bytes is not None:
        limit_memory(surroundings.extra_memory_bytes)
    return main(arguments)


def limit_memory(extra_bytes: int) -> None:
    """A bomb ends in a MemoryError, and not in the memory of everybody else on this machine."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra_bytes, now + extra_bytes))


def _hold_checkpoints(hold: Path) -> None:
    rename = os.rename

    def held_rename(source: Any, target: Any, **options: Any) -> None:
        while Path(source).name.startswith("tmp_step_") and hold.exists():
            time.sleep(0.005)
        rename(source, target, **options)

    os.rename = held_rename  # type: ignore[assignment]


def watch_changes(trace: Path | None, die_at: tuple[str, int] | None) -> None:
    """Python reports each of its file operations before it happens: `rename /a/tmp_step_2 /a/step_2`. Reads are left
    out. What libraries in C or Rust write (safetensors, SQLite) is not seen.
    """
    log = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if trace is not None else None
    pattern, left = (re.compile(die_at[0]), die_at[1]) if die_at is not None else (None, 0)
    lock = threading.RLock()

    def place(path: Any, folder: Any = -1) -> str:
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        return os.path.abspath(name)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not args or not isinstance(args[0], str | bytes | os.PathLike):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if event in ("os.rename", "os.link"):
            places = [place(args[0], args[2]), place(args[1], args[3])]
        else:
            places = [place(args[0], args[1] if event in ("os.remove", "os.rmdir") else -1)]
        line = " ".join([event.removeprefix("os."), *places])
        with lock:
            if log is not None:
                os.write(log, line.encode(errors="replace") + b"\n")
            if pattern is not None and pattern.search(line):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _die_in(place: str, left: int) -> None:
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, counted)
