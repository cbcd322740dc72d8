"""What the user can mend. The command line prints the message of an `InputError`, without a traceback, and exits with 64."""


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""


def reason_of(error: BaseException) -> str:
    """One line of a library's error, for use inside a message; the error's type where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
