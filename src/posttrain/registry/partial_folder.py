"""Folders that are being written: under a hidden name, and locked for as long as their writer lives.

The operating system takes the lock of a killed process back, so the next writer can tell what was left behind from what
somebody is still writing. A file system without such locks keeps what was left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

_PREFIX = ".partial-"


class PartialFolder:
    """An empty folder below `root`. Whoever renames it, or what is in it, keeps that; `remove` takes the rest away."""

    def __init__(self, root: Path) -> None:
        while True:  # until it was not taken for an abandoned one before it was locked
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
