"""Types: a program to run in a sandbox, its limits, and its outcome."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["namespaces", "landlock", "limits"]
Stopped = Literal["wall time", "cpu time", "memory", "processes", "output"]

READY = b"ready\n"


class SandboxFailure(Exception):
    """The sandbox failed, so there is no result for the program."""


class SandboxUnavailable(Exception):
    """This machine does not support the required protection; the message names what is missing and how to get it."""


@dataclass(frozen=True)
class Limits:
    """What a program and all that it starts may use. Memory and files are limited for all of them together."""

    cpu_s: int = 5  # of each process
    wall_s: float = 15.0
    max_memory_bytes: int = 1 << 30
    max_processes: int = 16  # threads count
    max_files_bytes: int = 64 << 20  # in the writable folder, and of one file
    max_output_bytes: int = 1 << 20  # standard output and error together
    max_open_files: int = 128


@dataclass(frozen=True)
class Program:
    """A command with the files that are put into its folder.

    A program that `announces` itself first writes `READY` to descriptor 3, before any untrusted code runs. If it never
    does, the sandbox failed; anything after that is attributed to the program.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    announces: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `exit_code` is negative for a signal, None if it was stopped for the reason in `stopped`."""

    exit_code: int | None
    stopped: Stopped | None
    stdout: bytes
    stderr: bytes
    report: bytes  # what it wrote to descriptor 3, without READY
    wall_s: float
    cpu_s: float  # of all its processes that had ended and been waited for; 0 if it was stopped

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and self.stopped is None

    def reason(self) -> str:
        """Why it did not succeed, in a few words."""
        if self.stopped is not None:
            return f"over the limit of {self.stopped}"
        assert self.exit_code is not None, "a program that was not stopped has ended"
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"
