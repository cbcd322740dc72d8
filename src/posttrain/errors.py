"""Errors that end a command with a message, and the exit code of each. Only `HardwareError` shows a traceback above it."""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""

    exit_code = 64


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""


# What the user can mend at the path that the error names: it is missing, of another kind, not allowed, not a name.
_OF_A_PATH = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ, errno.ENXIO,
}  # fmt: skip


def path_error(error: OSError) -> InputError | None:
    """The error of a file or folder as one that names the path and the reason; None if it is not about a path."""
    if error.errno not in _OF_A_PATH or error.filename is None:
        return None
    near = near_path(Path(os.fsdecode(error.filename))) if error.errno == errno.ENOENT else ""
    return InputError(f"{printable(error.filename)}: {error.strerror}{near}")


def near_path(path: Path) -> str:
    """A hint to put behind a path that does not exist: an entry of the same folder with a similar name, or nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f" (did you mean {printable(str(path.parent / close[0]))!r}?)" if close else ""


def printable(text: object) -> str:
    """A path or a word of the command line, also one that is not UTF-8."""
    return (
        os.fsdecode(text).encode("utf-8", "backslashreplace").decode() if isinstance(text, str | bytes) else str(text)
    )


class FolderHeld(InputError):
    """Another process is using the folder; the message names it. Nothing was written."""

    exit_code = 75


class Superseded(RuntimeError):
    """A newer attempt of this run has begun elsewhere, so this one writes nothing any more."""

    exit_code = 76


class HardwareError(RuntimeError):
    """Memory, network or a machine failed. The message names the rank, the stage, the cause and what to do."""

    exit_code = 1


class OutOfGpuMemoryError(HardwareError):
    """`stage` is the operation of the rank; `gpu_bytes` the memory of its GPU, 0 where it is not known."""

    def __init__(self, message: str, stage: str = "", gpu_bytes: int = 0) -> None:
        super().__init__(message)
        self.stage, self.gpu_bytes = stage, gpu_bytes


def reason_of(error: BaseException) -> str:
    """One line of a library's error, for use inside a message; the error's type where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
