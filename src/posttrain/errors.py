"""How commands and runs end: the exit codes, and the errors that end a command with a message.

Only errors of hardware and storage show a traceback above the message.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal


class ExitCode(IntEnum):
    """Of every command. Other programs rely on the numbers: schedulers, `posttrain node`, the pipeline."""

    DONE = 0
    CRASHED = 1
    ERROR_FOUND = 3  # the doctor found an error in a run; the gate rejects a model
    MORE_SAMPLES = 4  # the gate cannot decide
    BAD_INPUT = 64
    NO_PROGRESS = 65  # no rollout could be scored; attempts without a new checkpoint
    UNREACHABLE = 69  # the cluster
    STORAGE_FAILED = 74
    FOLDER_HELD = 75
    SUPERSEDED = 76
    SAVED = 85  # stopped by SIGTERM or SIGHUP after saving
    HANGUP = 129  # SIGHUP with nothing to save
    INTERRUPTED = 130
    TERMINATED = 143  # SIGTERM with nothing to save


STOPPED_UNSAVED = (ExitCode.HANGUP, ExitCode.TERMINATED)
VERDICT_CODES = {  # of the gate, also as the last stage of a pipeline
    "promote": ExitCode.DONE,
    "reject": ExitCode.ERROR_FOUND,
    "needs_more_samples": ExitCode.MORE_SAMPLES,
}


@dataclass(frozen=True)
class Ending:
    """Why a run stops training. `exit_code` is that of a run whose record is complete."""

    kind: Literal["finished", "threshold", "deadline", "doctor", "signal"]
    text: str
    exit_code: int = ExitCode.DONE


# For messages: a switch of the command line, and the argument of the Python functions.
RESTART = "--restart (restart=True in Python)"
RESUME_WITH_CHANGES = "--resume-with-changes (resume_with_changes=True in Python)"


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""


class RegistryError(InputError):
    """The registry or a request to it is invalid; the message names the cause and the remedy."""


class RegistryBusy(RegistryError):
    """Another process held the lock longer than the waiting time. Nothing was changed."""


class RegistryConflict(RegistryError):
    """The registry is no longer in the state that the caller expected. Nothing was changed."""


# What the user can fix at the path that the error names: it is missing, of another kind, not allowed, not a name.
_OF_A_PATH = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ, errno.ENXIO,
    errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP,
}  # fmt: skip


def path_error(error: OSError) -> InputError | None:
    """The error of a file or folder as one that names the path and the reason; None if it is not about a path."""
    if error.errno not in _OF_A_PATH or error.filename is None:
        return None
    near = near_path(Path(os.fsdecode(error.filename))) if error.errno == errno.ENOENT else ""
    return InputError(f"{printable(error.filename)}: {error.strerror}{near}")


def near_path(path: Path) -> str:
    """A hint to put behind a path that does not exist: where its first missing part is similar to what is there, or
    nothing."""
    rest = Path()
    while path != path.parent and not os.path.exists(path.parent):
        path, rest = path.parent, path.name / rest
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    close = close or sorted(name for name in names if path.name and name.startswith(f"{path.name}-"))
    meant = path.parent / close[0] / rest if close else path
    return f" (did you mean {printable(str(meant))!r}?)" if os.path.exists(meant) else ""


# Error codes of storage that is full, unavailable or defective, for any call.
STORAGE_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}


def place_and_reason(error: OSError) -> str:
    """For messages: the reason, and the path that the system refused, which may be another than the one asked for."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{printable(error.filename)}: {reason}"


def storage_error(error: BaseException) -> StorageError | None:
    """The error of a run that has begun, if it is one of its files; None if it is something else."""
    if isinstance(error, StorageError):
        return error
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in STORAGE_FAULTS | {errno.EROFS}):
        return None
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return StorageError(
        f"{place_and_reason(error)}{notes}. The run had begun, so this is a fault of the storage: when it is fixed, "
        "the same command resumes from the newest checkpoint"
    )


def printable(text: object) -> str:
    """A path or a word of the command line, also one that is not UTF-8."""
    return (
        os.fsdecode(text).encode("utf-8", "backslashreplace").decode() if isinstance(text, str | bytes) else str(text)
    )


class FolderHeld(InputError):
    """Another process is using the folder; the message names it. Nothing was written."""

    exit_code = ExitCode.FOLDER_HELD


class Superseded(RuntimeError):
    """A newer attempt of this run has begun elsewhere, so this one writes nothing any more."""

    exit_code = ExitCode.SUPERSEDED


class StorageError(RuntimeError):
    """A file of a run that has begun cannot be read or written. Nothing is wrong with the input; a later try may
    succeed."""

    exit_code = ExitCode.STORAGE_FAILED


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. `saved`: all that was finished is on the disk, and the same command goes on from there."""

    def __init__(self, number: int, *, saved: bool = False) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = ExitCode.SAVED if saved else 128 + number
        super().__init__(self.signal.name)


class StopRequested(Exception):
    """The run was asked to stop, and the step has not changed the model yet: it is left undone, and repeated on
    resume."""


class HardwareError(RuntimeError):
    """Memory, network or a machine failed. The message names the rank, the stage, the cause and what to do."""

    exit_code = ExitCode.CRASHED


class RankLostError(HardwareError):
    """A rank, an engine or the connection between them ended or did not answer in time. Another attempt may succeed."""


class EngineLostError(RankLostError):
    """The process of an engine that had started ended or did not answer in time. Another engine can repeat the call."""


class OutOfGpuMemoryError(HardwareError):
    """`stage` is the operation of the rank; `gpu_bytes` the memory of its GPU, 0 where it is not known."""

    def __init__(self, message: str, stage: str = "", gpu_bytes: int = 0) -> None:
        super().__init__(message)
        self.stage, self.gpu_bytes = stage, gpu_bytes


def exit_code_of(error: BaseException) -> int | None:
    """Of a command that ends with `error`; None: a crash."""
    if isinstance(error, InputError | Superseded | StorageError | Terminated):
        return error.exit_code
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else None


def reason_of(error: BaseException) -> str:
    """One line of a library's error, for use inside a message; the error's type where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
