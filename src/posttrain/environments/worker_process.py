"""The parent's side of one worker process: start, non-blocking communication, cause of death, kill.

Independent of rewards and scheduling, which the pool handles. Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil  # type: ignore[import-untyped]

from posttrain.config.rewards import AgentConfig, PythonRewardConfig
from posttrain.environments import worker as worker_program
from posttrain.environments.item import WORKER_MARK
from posttrain.environments.reward_types import WORKER_SCORERS
from posttrain.environments.settings import RewardSettings, read_agents, read_settings, read_turns
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.processes import Child, ending_of, frame, passed_variables, take_frames, with_direct_loopback

START_LIMIT_S = 120.0
_KEPT_OUTPUT_BYTES = 16_384
_MAX_REPLY_BYTES = 8 << 20  # the longest answer of an agent, all of it escaped in JSON
_EXIT_GRACE_S = 1.0
_KILL_GRACE_S = 5.0
_DUMP_GRACE_S = 0.1


class WorkerProcess:
    """A started worker. `ready` once its scorer is built; `failed_start`: why it could not be; `gone` when dead."""

    def __init__(self, settings: RewardSettings) -> None:
        self.ready = False
        self.gone = False
        self.has_worked = False  # the pool's note: it came as far as a completion
        self.failed_start: JsonObject | None = None
        self.started_at = time.monotonic()
        self._mark = token_hex(8)
        self.output = bytearray()  # the end of what it printed since `take_output`
        self._closed = False
        self._output_ended = False
        self._incoming = bytearray()
        self._outgoing = bytearray()
        request_fd, self.request_fd = os.pipe()
        self.reply_fd, reply_fd = os.pipe()
        self.output_fd, output_fd = os.pipe()
        # -P keeps the folder of the program, full of our modules, off sys.path; -u: what it prints survives its death.
        command = [sys.executable, "-P", "-u", str(Path(worker_program.__file__).resolve())]
        # Many workers share the cores, and the order of sets must not depend on the worker.
        own = settings.config
        inherited = passed_variables(own.env) if isinstance(own, AgentConfig) else with_direct_loopback(os.environ)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **inherited, WORKER_MARK: self._mark}
        try:
            self.process = Child(command, (request_fd, reply_fd), output_fd, environment)
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(output_fd)
        for fd in (self.request_fd, self.reply_fd, self.output_fd):
            os.set_blocking(fd, False)
        setup = {**settings.worker_setup(), "sys_path": [str(entry) for entry in sys.path]}
        self.send(0, json.dumps(setup).encode())

    def send(self, number: int, payload: bytes) -> None:
        self._outgoing += frame(pickle.dumps((number, payload)))
        self._flush()

    def exchange(self) -> list[tuple[int, JsonObject]]:
        """Move what can be moved through the pipes; the complete replies. `gone` is up to date afterwards."""
        self._flush()
        self._drain_output()
        replies = self._receive()
        if not self.gone and self.process.poll() is not None:
            # Children it left behind may hold the pipe open, so there need not be an end of file.
            self.gone = True
            replies += self._receive()
        for number, reply in replies:
            if number == 0 and not self.ready:
                self.ready = "error" not in reply
                self.failed_start = None if self.ready else reply
        return [(number, reply) for number, reply in replies if number != 0]

    def death(self) -> tuple[str, str | None]:
        """Why the worker died, in one line, and its last output."""
        self.process.ended_within(_EXIT_GRACE_S)
        self._drain_output()
        code = self.process.poll()
        if code is None:
            return "the worker closed its pipe", self._last_words()
        if code >= 0:
            return f"the worker process exited with code {code}", self._last_words()
        hint = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
        return f"the worker process was killed by {ending_of(code)}{hint}", self._last_words()

    def stack(self) -> str | None:
        """Its current stack if available; else its last output."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, worker_program.DUMP_SIGNAL)
        give_up_at = time.monotonic() + _DUMP_GRACE_S
        complete = False
        while not complete and time.monotonic() < give_up_at:
            seen = len(self.output)
            time.sleep(0.01)
            self._drain_output()
            complete = b"most recent call first" in self.output and len(self.output) == seen
        return self._last_words()

    def take_output(self) -> str:
        """What it printed since the last call; of a lot, the end."""
        text = self.output.decode("utf-8", "replace")
        self.output.clear()
        return text

    def close_requests(self) -> None:
        """No more requests follow: an idle worker exits by itself and runs its atexit handlers."""
        if self.request_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.request_fd)
        self.request_fd = -1

    def stop(self) -> None:
        """Wait briefly for it to exit, then kill it."""
        self.close_requests()
        self.process.ended_within(_EXIT_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End it and everything it started: its process group, and children that moved to a group of their own."""
        if self._closed:
            return
        strays: list[Any] = []
        if self.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                strays = psutil.Process(self.process.pid).children(recursive=True)
        else:  # its children have no parent that tells us of them
            strays = [process for process in psutil.process_iter() if self._is_marked(process)]
        self.process.kill_group(_KILL_GRACE_S)
        for stray in strays:
            with contextlib.suppress(Exception):
                stray.kill()
        self._close_pipes()

    def _is_marked(self, process: Any) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return bool(process.environ().get(WORKER_MARK) == self._mark)
        return False

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = os.write(self.request_fd, self._outgoing[: 1 << 16])
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._outgoing[:sent]

    def interests(self) -> list[tuple[int, int]]:
        """What to wait for: (file descriptor, event). An output that has ended would never stop being readable."""
        interests = [(self.reply_fd, select.POLLIN)]
        if not self._output_ended:
            interests.append((self.output_fd, select.POLLIN))
        if self._outgoing:
            interests.append((self.request_fd, select.POLLOUT))
        return interests

    def _receive(self) -> list[tuple[int, JsonObject]]:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self.reply_fd, 1 << 16)
                if not data:
                    self.gone = True
                    break
                self._incoming += data
        replies: list[tuple[int, JsonObject]] = []
        try:
            for text in take_frames(self._incoming, _MAX_REPLY_BYTES):
                number, reply = json.loads(text)
                replies.append((int(number), dict(reply)))
        except (TypeError, ValueError, OverflowError):
            self.gone = True  # something else wrote to our pipe
        return replies

    def _drain_output(self) -> None:
        if self._output_ended:
            return
        # A bounded number of reads: a worker that prints without end must not keep the parent from its other workers.
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                data = os.read(self.output_fd, 1 << 16)
                if not data:
                    self._output_ended = True
                    break
                self.output += data
                del self.output[:-_KEPT_OUTPUT_BYTES]

    def _last_words(self) -> str | None:
        text = self.output.decode("utf-8", "replace").strip()
        for marker in ("Fatal Python error", "Stack (most recent call first)"):
            if marker in text:
                text = text[text.rindex(marker) :]
                break
        ours = str(Path(worker_program.__file__).parent)
        return "\n".join(line for line in text.splitlines() if ours not in line)[-4000:] or None

    def _close_pipes(self) -> None:
        self._closed = self.gone = True
        for fd in (self.request_fd, self.reply_fd, self.output_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)


def wait_for(workers: Sequence[WorkerProcess], limit_s: float) -> None:
    """Sleep until a worker is readable or writable, or until the timeout."""
    poll = select.poll()
    for worker in workers:
        for fd, event in worker.interests():
            poll.register(fd, event)
    poll.poll(max(0.0, limit_s) * 1000)


# -- checks before a run -----------------------------------------------------------------------------------------------


def check_environments(mapping: Any, base_folder: Path | None = None) -> None:
    """Raise `InputError` if a block under `env:` is wrong, or what it names cannot be used, before a model is loaded.

    Each reward is started once, in a worker, as it will be for the run. A reward function that hangs, exits or crashes
    while it is imported is reported like one that raises, and does not affect this process.
    """
    for environment in read_settings(mapping, base_folder).values():
        for settings in environment.rewards.values():
            # In-process rewards are checked when they are built; workers cannot start them.
            if settings.config.type in WORKER_SCORERS:
                _start_once(settings)
    for settings in (*read_turns(mapping, base_folder).values(), *read_agents(mapping, base_folder).values()):
        _start_once(settings)


def _start_once(settings: RewardSettings) -> None:
    worker, reason = WorkerProcess(settings), ""
    try:
        while not worker.ready and not reason:
            left_s = worker.started_at + START_LIMIT_S - time.monotonic()
            wait_for([worker], min(left_s, 0.5))
            worker.exchange()
            if worker.failed_start is not None:
                reason = str(worker.failed_start["error"])
            elif worker.gone and not worker.ready:
                how, last_words = worker.death()
                reason = f"{how} while importing it\n{last_words or ''}".rstrip()
            elif left_s <= 0 and not worker.ready:
                reason = f"it has not finished importing after {START_LIMIT_S:g} s\n{worker.stack() or ''}".rstrip()
    finally:
        worker.kill()
    if reason and isinstance(settings.config, PythonRewardConfig):
        raise InputError(f"{settings.path}.function is {settings.config.function!r}: {reason}")
    if reason:
        raise InputError(f"{settings.path} cannot start: {reason}")
