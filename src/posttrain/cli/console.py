"""stdout and stderr of the command line: a console that is full, closed or gone does not end a command.

A write that fails is noted, and the command goes on. A reader that has gone does not come back, so nothing more is
written to it; a full disk may have room again, so later writes are tried. Commands whose output is their result ask
`unwritten` at the end whether all of it arrived.

Credentials are left out of everything that is printed, from any source: tracebacks and the logs of libraries come this
way too. Control characters are shown as `\\x1b`: text of models, data and files must not steer the terminal. Colours
and what progress bars need are let through.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from posttrain.files.redaction import redact

_GONE = {errno.EPIPE, errno.EBADF}


# Colours, moves by lines, clearing a line, hiding the cursor; and all other control characters but tab and line ends.
_CONTROL = re.compile(r"(\x1b\[(?:[\d;]*m|\d*[ABGK]|\?25[hl]))|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    return _CONTROL.sub(lambda match: match[1] or f"\\x{ord(match[0]):02x}", text)


class ConsoleStream:
    """Wraps a text stream; `write` and `flush` never raise. `problem` is the first failure."""

    def __init__(self, stream: TextIO | None) -> None:
        # A real file even where there is none: some libraries ask for a descriptor.
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115
        self.problem: Exception | None = None
        self._is_gone = stream is None

    def write(self, text: str) -> int:
        self._attempt("write", visible(redact(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return not self._is_gone and self._stream.isatty()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:  # fileno, buffer, errors, ...
        return getattr(self.__dict__["_stream"], name)

    @property
    def is_reader_gone(self) -> bool:
        """The other end of a pipe was closed, as `head` does; that is no error worth a message."""
        return isinstance(self.problem, OSError) and self.problem.errno == errno.EPIPE

    def _attempt(self, method: str, *arguments: str) -> None:
        if self._is_gone:
            if self.problem is None and method == "write":
                self.problem = OSError(errno.EBADF, "it is closed")
            return
        try:
            getattr(self._stream, method)(*arguments)
        except UnicodeEncodeError:
            self.write(arguments[0].encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream was closed in this process
            self.problem = self.problem or error
            if not isinstance(error, OSError) or error.errno in _GONE:
                self.discard()

    def discard(self) -> None:
        """Drop what is buffered and all that follows: a failure of Python's flush at exit changes the exit code."""
        self._is_gone = True
        with suppress(OSError, ValueError):
            _point_at_null(self._stream.fileno())


@contextmanager
def surviving_console() -> Iterator[tuple[ConsoleStream, ConsoleStream]]:
    """Inside, `sys.stdout` and `sys.stderr` are streams that do not raise; yields both."""
    _open_standard_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    out, err = ConsoleStream(sys.stdout), ConsoleStream(sys.stderr)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for the rest of the process
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        for stream in (out, err):
            stream.flush()
            if stream.problem is not None:
                stream.discard()
        sys.stdin, sys.stdout, sys.stderr = before


def unwritten(out: ConsoleStream) -> str:
    """Why stdout did not get all that was printed; empty if it did."""
    out.flush()
    if out.problem is None:
        return ""
    return out.problem.strerror or str(out.problem) if isinstance(out.problem, OSError) else str(out.problem)


def _open_standard_descriptors() -> None:
    """A closed 0, 1 or 2 would be given to the next file that is opened, and stray output would end up in it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _point_at_null(descriptor)


def _point_at_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
