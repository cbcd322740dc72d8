"""Folders of a registry that are not complete yet.

They are written under a hidden name and locked as long as their writer runs. The operating system releases the locks of a
killed process, so the next writer can tell what was left behind from what is being written. On a network file system the
locks are only as good as its `flock`; without locks, what was left behind is kept.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from posttrain.locks import try_lock

_PREFIX = ".partial-"


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
            is_locked = True
            with suppress(OSError):
                is_locked = try_lock(self._lock)
            if is_locked and self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_abandoned(root: Path) -> None:
    """Remove what killed processes were writing below `root`."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is gone
            lock = os.open(folder, os.O_RDONLY)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
