"""A member of the gang: what the first process of every pod does. Rank 0 does more (`head.py`).

Everything that happens becomes a call in one queue: signals, ended processes, messages, notices, deadlines. One thread
processes it, so no state is shared.

A worker joins rank 0, starts Ray on request of rank 0, reports interruptions, and ends with the code that rank 0 gives.
When the connection is lost, the worker ends with 85: the gang is started again as a whole.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from posttrain.apps.launch.node.checks import check_machine
from posttrain.apps.launch.node.contract import NodeSettings
from posttrain.apps.launch.node.control import Link, connect
from posttrain.apps.launch.node.notices import Notice, metadata_service, start_watch
from posttrain.apps.launch.node.session import Message, as_exit_code, ray_token
from posttrain.errors import ExitCode, InputError

JOIN_S = 1800.0  # for all machines of a gang to start
RAY = "ray"
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
# The error of `ray start` if the head has not registered its node after three requests to the GCS.
_HEAD_NOT_READY, _RAY_STARTS = "No node info found for head node in GCS", 10
_LONGEST_TAIL = 8192  # of the output of `ray start` in a message


class Children:
    """Processes of a member: started, reaped with their orphans, and ended.

    PID 1 of a container inherits all orphans and must reap them. If `posttrain node` is not PID 1, it becomes a
    subreaper (PR_SET_CHILD_SUBREAPER), so that no process outlives it.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        if sys.platform == "linux" and os.getpid() != 1:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        """OSError if the command does not exist. It gets its own session, so that it does not receive signals for this
        process.

        `log` gets its output; None: the output of the pod."""
        with open(log, "wb") if log is not None else nullcontext() as file:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if file is not None else None,
            )
        self._names[process.pid] = name
        self._processes[name] = process

    def is_running(self, name: str) -> bool:
        return name in self._processes

    def signal(self, name: str, number: signal.Signals) -> None:
        if name in self._processes:
            with suppress(ProcessLookupError):
                os.kill(self._processes[name].pid, number)

    def reap(self) -> list[tuple[str, int]]:
        """Reap ended processes. Of the processes that were started here: name and exit code, 128 + N after signal N."""
        ended: list[tuple[str, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if (name := self._names.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._processes.pop(name).returncode = code  # else Popen would wait for it
                ended.append((name, code if code >= 0 else 128 - code))

    def kill_all(self, limit_s: float = 2.0) -> None:
        """Everything below this process. A process that hangs in the kernel ends with the container."""
        end = time.monotonic() + limit_s
        while (below := psutil.Process().children(recursive=True)) and time.monotonic() < end:
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            self.reap()
            time.sleep(0.01)


class Member:
    def __init__(self, settings: NodeSettings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.environment = dict(environment)
        self.rank = settings.rank
        self.joins_as: object = settings.rank  # None: rank 0 gives the number
        self.children = Children()
        self.code: int | None = None  # set: the loop ends
        self.deadline = math.inf  # when this machine ends, by time.monotonic(), as far as is known
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._link: Link | None = None
        self._num_ray_starts = 0
        self._ray_log = Path(tempfile.mkdtemp(prefix="posttrain-node-")) / "ray-start.log"

    def ray_output_tail(self) -> str:
        """The last lines that `ray start` printed."""
        with suppress(OSError):
            lines = self._ray_log.read_text("utf-8", "replace").splitlines()[-10:]
            return "".join(f"\n  {line}" for line in lines)[-_LONGEST_TAIL:]
        return ""

    def say(self, text: str) -> None:
        name = "worker" if self.rank is None else f"rank {self.rank}"
        print(f"posttrain node, {name}: {text}", file=sys.stderr, flush=True)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the gang is over. Returns the exit code of the pod."""
        # They are not put back: a signal while this process ends must not replace its exit code.
        for number in (*_HEARD, signal.SIGCHLD):
            signal.signal(number, self._receive_signal)
        # Ignored signals are inherited: a warning must not kill a driver that has not installed its handler yet.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            self._work(self._begin)
            while self.code is None:
                self._wait()
            return self.code
        finally:
            self.children.kill_all()

    def _work(self, event: Callable[[], None]) -> None:
        try:
            event()
        except InputError as error:
            self.end(error.exit_code, str(error))

    def _wait(self) -> None:
        self._timers.sort(key=lambda timer: timer[0])
        if self._timers and self._timers[0][0] <= time.monotonic():
            self._work(self._timers.pop(0)[1])
            return
        left_s = max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else None
        try:
            event = self._events.get(timeout=left_s)
        except queue.Empty:
            return
        self._work(event)

    def later(self, event: Callable[[], None]) -> None:
        """From any thread: `event` is called in the thread of `run`."""
        self._events.put(event)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        if moment < math.inf:
            self._timers.append((moment, event))

    def _receive_signal(self, number: int, frame: object) -> None:
        notice = Notice(signal.Signals(number).name, self.settings.grace_s, is_final=True)
        self._events.put(self._reap if number == signal.SIGCHLD else partial(self.on_notice, notice))

    def _reap(self) -> None:
        for name, code in self.children.reap():
            self.on_end(name, code)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        check_machine(self.settings)
        service = metadata_service(self.settings.notice, self.environment, self.settings.grace_s)
        if service is not None:
            start_watch(service, lambda notice: self.later(partial(self.on_notice, notice)), self.say)
        self.begin()

    def _pass_on(self, link: Link, message: Message) -> None:
        self.later(partial(self._on_message, link, message))

    def _on_message(self, link: Link, message: Message) -> None:
        try:
            self.on_message(link, message)
        except (KeyError, ValueError, TypeError) as error:
            self.say(f"{link.peer_address} sent what no member sends: {error!r}")
            link.close()

    # -- a worker ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        threading.Thread(target=self._join, name="join", daemon=True).start()

    def _join(self) -> None:
        settings = self.settings
        joined = connect(
            settings.head_host,
            settings.control_port,
            settings.secret,
            settings.run,
            self.joins_as,
            self._pass_on,
            lambda link: self.later(partial(self.end, ExitCode.SAVED, "rank 0 is gone")),
            limit_s=JOIN_S,
            say=self.say,
        )
        if joined is None:
            self.later(partial(self.end, ExitCode.SAVED, "rank 0 did not start"))
        else:
            self.later(partial(self._on_welcome, *joined))

    def _on_welcome(self, link: Link, welcome: Message) -> None:
        self._link = link
        link.start()
        self.rank = int(str(welcome["rank"]))
        self.say(f"joined {self.settings.head_host}")
        if self.settings.is_kuberay:
            self.start_ray(shlex.split(self.settings.ray_command.rpartition(";")[2]))

    def on_message(self, link: Link, message: Message) -> None:
        kind = message["type"]
        if kind == "go":
            self.take_ray_token(link.session.attempt)
            head, own = f"--address={message['address']}", f"--node-ip-address={link.own_address}"
            self.start_ray(["ray", "start", head, own, *self.ray_options()])
        elif kind == "stop":
            self.end(as_exit_code(message["code"]), str(message["why"]))

    def take_ray_token(self, attempt: str) -> None:
        """The same in all pods of an attempt, and another in each attempt."""
        token = ray_token(self.settings.secret, attempt)
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def ray_options(self) -> list[str]:
        return ["--block", "--disable-usage-stats", f"--num-gpus={self.settings.gpus_per_node}"]

    def start_ray(self, command: list[str]) -> None:
        self._ray_command, self._num_ray_starts = command, self._num_ray_starts + 1
        try:
            self.children.start(RAY, command, self.environment, self._ray_log)
        except OSError as error:
            raise InputError(f"Ray cannot be started ({error}): the image needs 'posttrain[ray]'") from error

    def on_notice(self, notice: Notice) -> None:
        self.say(notice.source if notice.seconds is None else f"{notice.source}, {notice.seconds:.0f} s left")
        if notice.is_final:
            seconds = self.settings.grace_s if notice.seconds is None else notice.seconds
            self.deadline = min(self.deadline, time.monotonic() + seconds)
            self.at(self.deadline, partial(self.end, ExitCode.SAVED, "the machine's time is over"))
        if self._link is not None:
            self._link.send(
                {"type": "notice", "source": notice.source, "seconds": notice.seconds, "is_final": notice.is_final}
            )
        elif notice.is_final:
            self.end(ExitCode.SAVED, "nothing had begun")

    def on_end(self, name: str, code: int) -> None:
        """Rank 0 decides whether the gang continues."""
        assert self._link is not None
        output = self.ray_output_tail()
        if name == RAY and _HEAD_NOT_READY in output and self._num_ray_starts < _RAY_STARTS:
            self.say("the head's Ray node is not registered yet; starting Ray again")
            self.start_ray(self._ray_command)
            return
        self._link.send({"type": "failed", "code": ExitCode.CRASHED, "why": f"{name} ended with {code}{output}"})

    def end(self, code: int, why: str) -> None:
        if self.code is None:
            self.say(f"{why}; exit code {code}")
            self.code = code
