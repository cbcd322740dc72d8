"""Durable writes: files and folders that are whole or not there, and survive a power failure.

Renaming makes a change atomic; `fsync` makes it last. A file needs both its own `fsync` and that of the folder that
holds its name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import InputError
from posttrain.files.redaction import redact

# Errors of filesystems that have no such operation (some network and object-store mounts, for folders mostly). Nothing
# can be done about those. EIO, ENOSPC and EDQUOT are not among them: they mean that data was lost.
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_FOLDER_CANNOT_BE_OPENED = {errno.EACCES, errno.EPERM, errno.EISDIR}
PARTIAL = ".partial"  # the end of the names of unfinished files


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


@contextmanager
def replacing(path: Path, *, sync: bool = True, partial: Path | None = None) -> Iterator[Path]:
    """A file to write that becomes `path` on leaving, and is removed on an error. Readers, also after a crash, find
    either the complete old or the complete new content; with `sync` also after a power failure. `partial`: its name,
    where several processes may write at once."""
    partial = partial or path.with_name(f".{path.name}{PARTIAL}")
    try:
        yield partial
        if sync:
            sync_file(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def write_text(path: Path, text: str, redacted: Callable[[str], str] = redact) -> None:
    """Replace `path` by `text`. Credentials are left out: by `redact`, or `redact_values` for text of models and
    data."""
    with replacing(path) as partial:
        partial.write_text(redacted(text), encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


def create(path: Path, text: str, partial: Path) -> None:
    """Write a new file, whole; FileExistsError if another process was faster. It is not on the disk yet."""
    try:
        partial.write_text(text, encoding="utf-8")
        try:
            os.link(partial, path)  # unlike a rename, it fails where the name is taken
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with path.open("x"):
                os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def move(path: Path, target: Path) -> None:
    """Rename a file or a folder. The change is on the disk when this returns."""
    os.rename(path, target)
    for folder in {path.parent, target.parent}:
        sync_folder(folder)


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file. It is on the disk when this returns."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def cut_torn_line(file: Path) -> None:
    """A line without its end was being written when the process died."""
    content = file.read_bytes() if file.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as stream:
            stream.truncate(whole)
            os.fsync(stream.fileno())


def write_for_user(path: Path, text: str) -> None:
    """A file that the user requested, whole or not at all; InputError where it cannot be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


# -- folders -----------------------------------------------------------------------------------------------------------


def put_folder(new: Path, target: Path, old: Path) -> None:
    """Rename `new` to `target`. What was there is now `old`; after an error it is where it was."""
    if target.exists():
        os.rename(target, old)
        try:
            os.rename(new, target)
        except BaseException:
            if not target.exists():
                os.rename(old, target)
            raise
    else:
        os.rename(new, target)
    sync_folder(target.parent)


@contextmanager
def new_folder(target: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """A folder to write into that becomes `target` on leaving; on an error nothing is left, and `target` is as it was.

    `check` raises an error if what is at `target` by then must not be replaced.
    """
    target = target.resolve()  # a link stays, and the folder that it leads to is written
    owner = f"unfinished-{socket.gethostname()}-{os.getpid()}"
    unfinished, replaced = (target.with_name(f".{target.name}.{prefix}{owner}") for prefix in ("", "replaced-"))
    try:
        make_folder(target.parent)
        _remove_abandoned(target)
        unfinished.mkdir()
        yield unfinished
        check(target)  # another process may have written there meanwhile
        put_folder(unfinished, target, replaced)
        if replaced.exists():
            shutil.rmtree(replaced)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(f"{target} cannot be written: {error}") from error
        raise


def _remove_abandoned(target: Path) -> None:
    """Remove what a killed process left beside `target`. The folder that it was about to replace is restored, unless
    there is another one already."""
    import psutil  # type: ignore[import-untyped]

    pattern = re.compile(rf"\.{re.escape(target.name)}\.(replaced-)?unfinished-{re.escape(socket.gethostname())}-(\d+)")
    for entry in target.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if not match or (psutil.pid_exists(int(match[2])) and int(match[2]) != os.getpid()):
            continue
        if match[1] and not target.exists():
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)
