"""A program of `side/` in a Python environment of its own, as a child of a worker: started, asked, and ended."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.environments.item import WORKER_MARK, BadSetup, Unscored
from posttrain.processes import Child, ending_of, frame, passed_variables, take_frames

_SIDE = Path(__file__).parent / "side"
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # would bring our packages into the other environment
_START_LIMIT_S = 110.0  # below that of a worker
_MAX_REPLY_BYTES = 256 << 20


class SideError(Unscored):
    """The other side answered with an error of this kind."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class SideProcess:
    """What it prints is the worker's output. A process that died is started again for the next request."""

    def __init__(
        self,
        python: str | None,
        program: str,
        setup: Mapping[str, object],
        limit_s: float,
        variables: Mapping[str, str | None],
    ) -> None:
        self._python, self._program = os.path.expanduser(python or sys.executable), program
        mark = {WORKER_MARK: os.environ.get(WORKER_MARK, "")}
        given = {**passed_variables(variables), **mark}
        self._variables = {name: value for name, value in given.items() if name in variables or name not in _OURS}
        self._setup, self._limit_s = dict(setup), limit_s
        self._child: Child | None = None
        self._socket: socket.socket
        self.starts = 0
        try:
            self.about = self._start()
        except Unscored as error:
            raise BadSetup(str(error)) from error

    @property
    def pid(self) -> int:
        return -1 if self._child is None else self._child.pid

    def ask(self, operation: str, **arguments: object) -> Any:
        """The answer. `SideError` if it is one; `Unscored` if the process died or did not answer in time."""
        if self._child is None:
            self._start()
        return self._exchange({"operation": operation, "arguments": arguments}, self._limit_s)

    def end(self) -> None:
        if self._child is not None:
            self._socket.close()
            self._child.kill_group(5.0)
        self._child = None

    def _start(self) -> Any:
        ours, theirs = socket.socketpair()
        command = [self._python, "-u", str(_SIDE / self._program)]
        try:
            self._child = Child(command, [theirs.detach()], 2, self._variables)
        except OSError as error:
            ours.close()
            raise BadSetup(
                f"python = {self._python}: cannot be started ({error.strerror}); the Python of an environment with the "
                "package is needed"
            ) from error
        self._socket = ours
        self.starts += 1
        return self._exchange(self._setup, _START_LIMIT_S)

    def _exchange(self, request: Mapping[str, object], limit_s: float) -> Any:
        give_up_at, received = time.monotonic() + limit_s, bytearray()
        try:
            self._socket.sendall(frame(json.dumps(request).encode()))
            while not (frames := take_frames(received, _MAX_REPLY_BYTES)):
                ready, _, _ = select.select([self._socket], [], [], max(0.0, give_up_at - time.monotonic()))
                if not ready:
                    self.end()
                    raise Unscored(f"the environment did not answer within {limit_s:g} s")
                if not (data := self._socket.recv(1 << 20)):
                    raise ConnectionResetError
                received += data
        except OSError:
            raise self._death() from None
        reply = json.loads(frames[0])
        if "error" in reply:
            raise SideError(" ".join(str(reply["error"]).split()), reply["kind"])
        return reply["done"]

    def _death(self) -> Unscored:
        child = self._child
        assert child is not None
        how = ending_of(child.returncode) if child.ended_within(1.0) else "a closed connection"
        self.end()
        return Unscored(f"the environment's process ended with {how}")
