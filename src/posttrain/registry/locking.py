"""Writing to a registry in a local folder: one writer at a time, and folders that are not complete yet.

A writer holds a lock on a file; waiting for it has a limit. Folders are written under a hidden name and locked as long as
their writer runs. The operating system releases the locks of a killed process, so it blocks no other, and the next writer
can tell what was left behind from what is being written. On a network file system the locks are only as good as its
`flock`; without locks, what was left behind is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from posttrain.registry.errors import RegistryBusy, RegistryError

_POLL_S = 0.02
_PREFIX = ".partial-"


@contextmanager
def exclusive(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock inside the block; RegistryBusy, naming the holder, if it is not free within `wait_s`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RegistryError(
            f"{path}: cannot be opened for writing ({error.strerror}); do you have write access to the folder?"
        ) from error
    try:
        _wait_for(descriptor, path, wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_holder()).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # releases the lock


def _wait_for(descriptor: int, path: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RegistryBusy(
                    f"{path.parent}: the registry is being written by {_describe(descriptor)}; waited {wait_s:g} s, "
                    "nothing was changed. Try again, or wait longer (--wait-s)"
                ) from None
            time.sleep(_POLL_S)


def _holder() -> dict[str, object]:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:3]]).strip()
    return {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": time.strftime("%H:%M:%S")}


def _describe(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} ({holder['command']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


class PartialFolder:
    """An empty folder below `root`. The caller renames it, or files in it; `remove` deletes the rest."""

    def __init__(self, root: Path) -> None:
        while True:  # retried if another process removed it as abandoned before it was locked
            self.path = root / f"{_PREFIX}{uuid4().hex}"
            self.path.mkdir(parents=True)
            try:
                self._lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_abandoned(root: Path) -> None:
    """Remove what killed processes were writing below `root`."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked by its writer, or gone
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
