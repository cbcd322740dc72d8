"""What the user can mend, and what machines do.

The command line prints the message of an `InputError` without a traceback and exits with 64. It prints that of a
`HardwareError` after the traceback of its cause and exits with 1.
"""


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""


class HardwareError(RuntimeError):
    """Memory, network or a machine failed. The message names the rank, the stage, the cause and what to do."""


class OutOfGpuMemoryError(HardwareError):
    """`stage` is the operation of the rank; `gpu_bytes` the memory of its GPU, 0 where it is not known."""

    def __init__(self, message: str, stage: str = "", gpu_bytes: int = 0) -> None:
        super().__init__(message)
        self.stage, self.gpu_bytes = stage, gpu_bytes


def reason_of(error: BaseException) -> str:
    """One line of a library's error, for use inside a message; the error's type where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
