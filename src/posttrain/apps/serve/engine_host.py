"""Runs the engine's loop: in a separate process, or in a thread of the server (`--processes`).

The process is started before the models are known, so that its imports run in parallel with the server's. It ends with
the server in all cases: by a message, when its socket closes, or by a kernel signal.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from posttrain.apps.serve.channel import EngineChannel
from posttrain.apps.serve.engine_loop import EngineLoop
from posttrain.apps.serve.sessions import ModelsToLoad, Say, load_sessions
from posttrain.engines.native.session import SessionLimits
from posttrain.errors import HardwareError, InputError
from posttrain.processes import be_signalled_with_parent

# The engine's thread releases the interpreter lock with every operation that it launches, some dozens in a step, and
# waits this
# long to get it back while the event loop is busy. Python's default of 5 ms would be longer than a step.
_SWITCH_INTERVAL_S = 0.00005

log = logging.getLogger("posttrain.serve")


class EngineHost(Protocol):
    connection: socket.socket  # to the loop

    def load(self, models: ModelsToLoad, say: Say) -> list[SessionLimits]:
        """Load the models; the limits of their sessions. Raises what loading raises."""

    def start(self) -> None:
        """Start handling messages in the loop."""

    def stop(self, timeout_s: float) -> None:
        """Wait for the loop to end, then stop it. The server has sent `StopEngine`, or has timed out."""

    def ending(self) -> str:
        """How it ended, human-readable."""


class EngineThread:
    def __init__(self) -> None:
        self.connection, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="posttrain-engine", daemon=True)

    def load(self, models: ModelsToLoad, say: Say) -> list[SessionLimits]:
        self.loop = EngineLoop(load_sessions(models, say), EngineChannel(self._theirs))
        return [session.limits for session in self.loop.sessions]

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def ending(self) -> str:
        return "the engine's thread has ended"

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException:
            log.exception("the engine's thread has ended")


class EngineProcess:
    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C in the terminal is for the server, which drains first
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, models: ModelsToLoad, say: Say) -> list[SessionLimits]:
        channel = EngineChannel(self.connection)
        try:
            channel.send(models)
            while True:
                for kind, value in channel.receive(wait=True):
                    if kind == "say":
                        say(value)
                    elif kind == "failed":
                        raise value
                    else:
                        limits: list[SessionLimits] = value
                        return limits
        except ConnectionError:
            raise HardwareError(f"{self.ending()} while it loaded the models") from None

    def start(self) -> None:
        """It runs already."""

    def stop(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        self._process.wait()

    def ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)  # its socket may close before it ends
        code = self._process.returncode
        how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
        return f"the engine's process has ended{how}"


def main(arguments: Sequence[str]) -> int:
    descriptor, parent = map(int, arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the server drains, then sends `StopEngine`
    be_signalled_with_parent(signal.SIGKILL, parent)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    channel = EngineChannel(socket.socket(fileno=descriptor))
    try:
        [models] = channel.receive(wait=True)
        try:
            sessions = load_sessions(models, lambda line: channel.send(("say", line)))
        except Exception as error:
            channel.send(("failed", _portable(error)))
            return 1
        channel.send(("ready", [session.limits for session in sessions]))
    except ConnectionError:
        return 1  # the server has ended
    gc.freeze()  # loaded objects stay: garbage collections would scan them repeatedly
    EngineLoop(sessions, channel).run()
    return 0


def _portable(error: Exception) -> Exception:
    """The error, or one with its text where it cannot be pickled. Internal errors are logged with their traceback."""
    if not isinstance(error, InputError):
        log.error("the models could not be loaded", exc_info=error)
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
