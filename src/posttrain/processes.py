"""Child processes: started so that they end with their parent, frames between the two, and how they ended.

A frame is a length of 8 bytes and that many bytes; what they hold is up to the two ends. Only the standard library is
imported: programs that are started without posttrain on their path load this file by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

THAT_WRITE_NOTHING = "calculation"  # begins the names of threads that a stopped program does not wait for

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1

# -- frames ------------------------------------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def take_frames(buffer: bytearray, max_bytes: int | None = None) -> list[bytes]:
    """The content of all complete frames, which are removed from the buffer. ValueError if one is longer than
    `max_bytes`: something else wrote there, and nothing after it can be trusted."""
    found: list[bytes] = []
    begin = 0
    while len(buffer) >= begin + _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, begin)
        if max_bytes is not None and length > max_bytes:
            if found:
                break  # the next call reports it
            raise ValueError(f"a frame of {length} bytes; at most {max_bytes} are accepted")
        data = begin + _LENGTH.size
        if len(buffer) < data + length:
            break
        begin = data + length
        found.append(bytes(memoryview(buffer)[data:begin]))
    del buffer[:begin]
    return found


def read_frame(descriptor: int) -> bytes | None:
    """Waits for the next frame; None when the other side has closed the pipe or socket."""
    header = _read_exactly(descriptor, _LENGTH.size)
    return None if header is None else _read_exactly(descriptor, _LENGTH.unpack(header)[0])


def _read_exactly(descriptor: int, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        part = os.read(descriptor, min(length - len(data), _PIECE_BYTES))
        if not part:
            return None
        data += part
    return bytes(data)


def write_frame(descriptor: int, data: bytes) -> None:
    rest = memoryview(frame(data))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# -- variables ---------------------------------------------------------------------------------------------------------

_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH",
    "VIRTUAL_ENV", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
_PASSED_PREFIXES = ("LC_", "PYTHON", "XDG_")


def passed_variables(more: Mapping[str, str | None]) -> dict[str, str]:
    """For programs of others: the variables of this process that hold no credentials, and `more`. None as a value
    passes on the variable of that name.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _PASSED or name.startswith(_PASSED_PREFIXES) or (name in more and more[name] is None)
    }
    return with_direct_loopback({**own, **{name: value for name, value in more.items() if value is not None}})


def with_direct_loopback(variables: Mapping[str, str]) -> dict[str, str]:
    """No proxy stands between processes of this machine."""
    named = ",".join(variables.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    hosts = ",".join(dict.fromkeys([*(host for host in named.split(",") if host), "127.0.0.1", "localhost"]))
    return {**variables, "NO_PROXY": hosts, "no_proxy": hosts}


# -- the parent's side -------------------------------------------------------------------------------------------------


class Child(subprocess.Popen[bytes]):
    """A program in a session of its own: Ctrl-C goes to the parent only, and the whole group can be killed.

    Its last arguments are the descriptors that it inherits, which are closed here, and a lifeline: the end of a pipe
    that hangs up when this process ends, for `die_with_parent`.
    """

    def __init__(
        self, command: Sequence[str], inherited: Sequence[int], output: int | IO[bytes], environment: Mapping[str, str]
    ) -> None:
        theirs = tuple(inherited)
        self._lifeline = -1
        try:
            lifeline, self._lifeline = os.pipe()
            theirs = (*inherited, lifeline)
            super().__init__(
                [*command, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=theirs,
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            self.hang_up()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def hang_up(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._lifeline = -1

    def ended_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return self.returncode is not None

    def kill_group(self, wait_s: float) -> None:
        """End it and everything in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.ended_within(wait_s)
        self.hang_up()


def ending_of(code: int) -> str:
    """For messages: how a process with this return code ended."""
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"signal {-code} ({known.get(-code, 'unknown')})"


# -- the child's side --------------------------------------------------------------------------------------------------


def die_with_parent(lifeline: int) -> None:
    """End this process and what it started when the parent is gone, even by `kill -9`.

    The parent holds the other end of the pipe and never writes to it. On Linux the kernel itself kills our process
    group when that end closes: no code of ours has to run, so a reward that hangs with signals blocked cannot prevent
    it. Elsewhere a thread waits for it. (PR_SET_PDEATHSIG would do it when the *thread* that started us ends.)
    """
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):
        die_on_hangup(lifeline)
        return
    hung_up = select.poll()
    hung_up.register(lifeline, select.POLLHUP)
    if hung_up.poll(0):  # the parent was gone before the kernel was set up
        os._exit(0)


def die_on_hangup(lifeline: int, tidy: Callable[[], None] = lambda: None) -> None:
    """The same by a thread, which calls `tidy` first."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
        tidy()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def be_signalled_with_parent(number: signal.Signals, parent: int) -> None:
    """Be sent this signal when the process that started us ends (on Linux), however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it had ended before the call
        os._exit(128 + number)
