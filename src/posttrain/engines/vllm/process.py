"""Client of the vLLM process: starts it in its own Python environment, sends requests, waits with a deadline, reports
failures.

Independent of models and sampling. The server program is `side/posttrain_vllm.py`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import EngineLostError, HardwareError, InputError
from posttrain.files.json_files import JsonObject
from posttrain.processes import Child, ending_of, frame, take_frames

SIDE = Path(__file__).parent / "side"
_NUM_LOG_LINES = 12
START = "start"
# Environment variables that would leak this process's packages or memory settings into the other environment.
_OURS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)


class VllmError(HardwareError):
    """vLLM did not start, or refused a request."""


class VllmLostError(VllmError, EngineLostError):
    """A vLLM that had started ended or did not answer in time."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds without an answer, or without a heartbeat during sampling, after which vLLM counts as hung."""

    start_s: float
    answer_s: float


class VllmProcess:
    def __init__(
        self,
        python: str,
        options: Mapping[str, object],
        environment: Mapping[str, str],
        limits: Deadlines,
        weights: Path,
        program: Path = SIDE / "posttrain_vllm.py",
    ) -> None:
        """`weights` is a folder in memory that the process removes when it ends: a trainer that is killed cannot."""
        self._limits = limits
        self._has_failed = False
        self._incoming = bytearray()
        self._frames: list[JsonObject] = []  # that have arrived
        self.log = Path(tempfile.mkdtemp(prefix="posttrain-vllm-")) / "vllm.log"
        ours, theirs = socket.socketpair()
        command = [python, "-u", str(program), str(weights)]
        try:
            with self.log.open("wb") as log:
                self._process = Child(command, [theirs.detach()], log, _environment(environment))
        except OSError as error:
            ours.close()
            for folder in (weights, self.log.parent):
                shutil.rmtree(folder, ignore_errors=True)
            raise InputError(
                f"policy.generation.vllm_cfg.python = {python}: cannot be started ({error.strerror}); it must be the "
                "Python of an environment that has vLLM"
            ) from error
        self._socket = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        self._send(options=dict(options))
        try:
            self.version: str = self._answer(START, limits.start_s)["done"]["version"]
        except VllmError as error:
            if "No module named 'vllm" not in str(error):
                raise
            raise InputError(
                f"policy.generation.vllm_cfg.python = {python}: has no vLLM 0.25 or newer. {error}"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, operation: str, **fields: object) -> Any:
        """Returns the answer. Raises `VllmError` if vLLM exits, hangs or rejects the request."""
        self._send(operation=operation, **fields)
        return self._answer(operation, self._limits.answer_s)["done"]

    def stream(self, operation: str, **fields: object) -> SampledAnswers:
        self._send(operation=operation, **fields)
        return SampledAnswers(self)

    def close(self) -> None:
        """Stop the process. The log of a failed process is kept."""
        self._end()
        if not self._has_failed:
            shutil.rmtree(self.log.parent, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------------

    def _send(self, **fields: object) -> None:
        self._socket.settimeout(self._limits.answer_s)
        try:
            self._socket.sendall(frame(json.dumps(fields).encode()))
        except TimeoutError:
            raise self._failure("does not read its input", VllmLostError) from None
        except OSError:
            raise self._failure("has ended", VllmLostError) from None

    def _answer(self, operation: str, limit_s: float) -> JsonObject:
        """The next frame."""
        kind = VllmError if operation == START else VllmLostError
        give_up_at = time.monotonic() + limit_s
        while not (frames := self._frames):
            ready, _, _ = select.select([self._socket], [], [], max(0.0, give_up_at - time.monotonic()))
            if not ready:
                raise self._failure(f"has given no sign of life for {limit_s:.0f} s during `{operation}`", kind)
            try:
                data = self._socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                raise self._failure(f"ended during `{operation}`", kind)
            self._incoming += data
            frames += map(json.loads, take_frames(self._incoming))
        answer = frames.pop(0)
        if "error" in answer:
            raise self._failure(f"failed during `{operation}`: {answer['error']}")
        return answer

    def _failure(self, what: str, kind: type[VllmError] = VllmError) -> VllmError:
        """Kill the process and return the error."""
        pid = self._process.pid
        if self._process.ended_within(2.0 if "ended" in what else 0.0):
            what += f", {ending_of(self._process.returncode)}"
        self._has_failed = True
        self.close()
        lines = self.log.read_text("utf-8", "replace").splitlines()[-_NUM_LOG_LINES:]
        listed = "".join(f"\n    {line[:300]}" for line in lines)
        return kind(f"vLLM (process {pid}) {what}. The end of its log, {self.log}:{listed}")


class SampledAnswers:
    """The frames of one sampling call. The deadline applies to each frame."""

    def __init__(self, process: VllmProcess) -> None:
        self._process = process
        self.rest: list[Any] | None = None  # unfinished answers, set when the call is over

    def next_finished(self) -> list[Any]:
        """Newly finished answers; possibly none."""
        frame = self._process._answer("generate", self._process._limits.answer_s)
        if "done" in frame:
            self.rest = frame["done"]
            return []
        return frame["finished"]

    def go_on(self, wanted: bool) -> None:
        self._process._send(go_on=wanted)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    usual = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    return {**usual, **kept, "PYTHONPATH": str(SIDE), **own}


def _end(process: Child, connection: socket.socket) -> None:
    connection.close()
    process.hang_up()
    process.ended_within(0.2)
    process.kill_group(wait_s=10.0)
