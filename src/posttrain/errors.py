"""Errors that end a command with a message instead of a traceback, and the exit code of each."""


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""

    exit_code = 64


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""


class FolderHeld(InputError):
    """Another process is using the folder; the message names it. Nothing was written."""

    exit_code = 75


class Superseded(RuntimeError):
    """A newer attempt of this run has begun elsewhere, so this one writes nothing any more."""

    exit_code = 76


def reason_of(error: BaseException) -> str:
    """One line of a library's error, for use inside a message; the error's type where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
