"""One writer at a time for a registry in a local folder: a lock on a file, waited for with a limit.

The operating system takes the lock back when its holder dies, so a killed process blocks nobody. On a network file system
the lock is only as good as that file system's `flock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.registry.errors import RegistryBusy, RegistryError

_POLL_S = 0.02


@contextmanager
def exclusive(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock for the time of the block; RegistryBusy, naming the holder, if `wait_s` was not enough to get it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RegistryError(f"{path}: cannot be opened for writing ({error.strerror}); is the folder yours?") from error
    try:
        _wait_for(descriptor, path, wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_holder()).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # gives the lock back


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
