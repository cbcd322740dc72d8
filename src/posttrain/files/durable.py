"""Durable writes: file contents and names that survive a power failure.

Renaming makes a change atomic; `fsync` makes it last. A file needs both its own `fsync` and that of the folder that holds
its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from posttrain.errors import InputError
from posttrain.files.redaction import redact

# Errors of filesystems that have no such operation (some network and object-store mounts, for folders mostly). Nothing
# can be done about those. EIO, ENOSPC and EDQUOT are not among them: they mean that data was lost.
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
_FOLDER_CANNOT_BE_OPENED = {errno.EACCES, errno.EPERM, errno.EISDIR}


def sync_file(path: Path) -> None:
    """Return once the content of `path` is on the disk."""
    _sync(os.open(path, os.O_RDONLY))


def sync_folder(path: Path) -> None:
    """Return once the names in `path` are on the disk, if the filesystem supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _FOLDER_CANNOT_BE_OPENED | _NOT_SUPPORTED:
            return
        raise
    _sync(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and the parents it lacks, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def write_text(path: Path, text: str, redacted: Callable[[str], str] = redact) -> None:
    """Replace `path` by `text`: readers, also after a crash, find either the complete old or the complete new text.

    Credentials are left out: by `redact`, or `redact_values` for text of models and data.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(redacted(text))
        file.flush()
        _sync(os.dup(file.fileno()))
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_for_user(path: Path, text: str) -> None:
    """A file that the user requested, whole or not at all; InputError where it cannot be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
