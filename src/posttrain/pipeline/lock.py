"""One process at a time for a pipeline's folder, including the training that it started.

The training inherits the lock. If the pipeline is killed while its training is still saving, the next run waits for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from posttrain.checkpointing import durable
from posttrain.errors import InputError
from posttrain.json_files import JsonObject

LOCK_FILE = ".lock"
_POLL_S = 0.1


@contextmanager
def only_runner(home: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Yields the descriptor that holds the lock, for a child to inherit."""
    try:
        durable.make_folder(home)
        descriptor = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"pipeline.folder: {home} cannot be written ({error.strerror or error})") from error
    try:
        _acquire(descriptor, home, say)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_identity(os.getpid())).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, home: Path, say: Callable[[str], None]) -> None:
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        holder = _holder(descriptor)
        if holder.get("host") != socket.gethostname() or _is_alive(holder):
            raise InputError(
                f"{home}: another process is running this pipeline (process {holder.get('pid', '?')} on "
                f"{holder.get('host', '?')}); `posttrain pipeline status` shows its progress"
            )
        if not said:
            say("the run before was killed and its training is still saving; waiting for it")
            said = True
        time.sleep(_POLL_S)


def _identity(pid: int) -> JsonObject:
    return {"pid": pid, "host": socket.gethostname(), "created": psutil.Process(pid).create_time()}


def _holder(descriptor: int) -> JsonObject:
    for _ in range(20):  # a process that has just acquired the lock may not have written its name yet
        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
            return found if isinstance(found, dict) else {}
        except ValueError:
            time.sleep(_POLL_S / 10)
    return {}


def _is_alive(holder: JsonObject) -> bool:
    try:
        process = psutil.Process(int(holder["pid"]))
        return process.create_time() == holder["created"] and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False
