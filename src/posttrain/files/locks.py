"""Locks between processes: `flock` on a file that names its holder, and what is known of a process that holds
something.

The operating system releases the locks of a process that ends, however it ends. On a network file system a lock is only
as good as its `flock`; for run folders, which are shared between machines, `files/run_folder_lock.py` has more.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from posttrain.errors import FolderHeld

_POLL_S = 0.02
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock or a folder."""

    host: str
    pid: int
    machine: str  # the system since its boot, and the set of pids: within it, `pid` names one process
    created: float  # when the process began, by a clock that is never set; a later process may have the same pid
    command: str
    since: str

    @classmethod
    def this(cls) -> Holder:
        words = itertools.takewhile(lambda word: "=" not in word and not word.startswith("-"), sys.argv[1:3])
        command = " ".join([Path(sys.argv[0]).name, *words])  # no settings: they are for their own files
        return cls(socket.gethostname(), os.getpid(), _machine(), _created(os.getpid()) or 0.0, command, now_text())

    @classmethod
    def read(cls, content: Mapping[str, object]) -> Holder:
        """KeyError, ValueError or TypeError if `content` describes no holder."""
        return cls(**{field.name: _plain(field.type, content[field.name]) for field in fields(cls)})

    @property
    def is_on_this_machine(self) -> bool:
        """Whether `is_alive` can know."""
        return self.machine == _machine()

    @property
    def is_alive(self) -> bool | None:
        """None: it cannot be looked up, as where /proc hides the processes of other users."""
        try:
            return _created(self.pid) == self.created
        except PermissionError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command}), since {self.since}"


def _plain(kind: object, value: object) -> Any:
    return {"str": str, "int": int, "float": float}[str(kind)](value)


@functools.cache
def _machine() -> str:
    """Containers share the boot of their machine, but not its pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {psutil.boot_time()}"


def _created(pid: int) -> float | None:
    """When a process began: on Linux in ticks since the boot, which setting the clock does not change. None: it has
    ended. PermissionError if it is there and may not be looked at."""
    try:
        if sys.platform == "linux":
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if values[0] in "ZX" else float(values[19])
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (OSError, psutil.Error) as error:
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        except PermissionError:
            pass
        raise PermissionError(errno.EPERM, f"process {pid} cannot be looked up") from error


def now_text(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds")


class NoLocks(OSError):
    """The file system has no `flock`. The text says so with the mount option, for use inside a message."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            error.errno,
            f"its file system has no flock: {error.strerror}; mount it with locks (NFS: without `nolock`; Lustre: `-o "
            "flock`), or choose a folder on another one",
        )


class LockHeld(FolderHeld):
    """Another process has the lock."""

    def __init__(self, path: Path, holder: Holder | None, refusal: str) -> None:
        refusal = refusal or f"{path} is locked by {{holder}}"
        super().__init__(refusal.replace("{holder}", str(holder or "another process")))
        self.holder = holder


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder, for as long as the descriptor or a copy of it is open; False if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            raise NoLocks(error) from error
        raise


@contextmanager
def locked(path: Path, *, wait_s: float | None = None, refusal: str = "") -> Iterator[int]:
    """Hold the lock on `path`, which names the holder meanwhile. Yields its descriptor: a child that inherits it
    holds the lock, too. LockHeld if it is not free within `wait_s`; None waits as long as it takes. `refusal` is its
    message, with {holder} for the process that has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not try_lock(descriptor):
            if deadline is not None and time.monotonic() >= deadline:
                raise LockHeld(path, _holder(descriptor), refusal)
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Holder.this())).encode(), 0)
        yield descriptor
    except NoLocks as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> Holder | None:
    for _ in range(20):  # a process that has just acquired the lock may not have written its name yet
        try:
            return Holder.read(json.loads(os.pread(descriptor, 4096, 0)))
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(_POLL_S / 2)
    return None
