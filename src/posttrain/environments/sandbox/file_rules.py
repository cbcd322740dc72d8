"""Landlock: which files a process may touch where it cannot be given a root of its own. See landlock(7)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from posttrain.environments.sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_ONLY_READ = _EXECUTE | _READ_FILE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # later versions: 16
_SCOPE_SINCE = 6
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def restrict_files(read_only: Iterable[str], writable_folder: str) -> None:
    """From here on: reading beneath `read_only`, anything beneath `writable_folder`, nothing anywhere else."""
    version = kernel.landlock_version()
    everything = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    rules = {path: _READ if os.path.isdir(path) else _FILE_ONLY_READ for path in read_only}
    rules |= {device: _READ_FILE | _WRITE_FILE for device in _DEVICES if os.path.exists(device)}
    rules[writable_folder] = everything
    scoped = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPE_SINCE else 0
    kernel.landlock_restrict(everything, 0, scoped, version, rules)
