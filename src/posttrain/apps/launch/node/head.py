"""Rank 0: the members join it, it starts the driver, and it decides how the gang ends.

| what happens | what the gang does |
|---|---|
| the driver ends | all end with its code |
| an interruption of any machine | the driver is asked to save and stop, with the time that is left; all end with 85 |
| a member is gone | its ranks cannot be saved, so nothing is waited for: all end with 85 |
| a warning (rebalance, maintenance) | the driver saves after the present step, and goes on |
| an interruption while a driver that has recorded its end closes down | all end with the recorded code |

Under KubeRay drivers come and go (`driver.py`), and pods stay: there only what ends a machine ends a member.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from posttrain.apps.launch.node.contract import NodeSettings
from posttrain.apps.launch.node.control import Link, Listener, port_is_open
from posttrain.apps.launch.node.member import JOIN_S, RAY, Member
from posttrain.apps.launch.node.notices import Notice
from posttrain.apps.launch.node.session import Message, as_exit_code, as_seconds, new_nonce
from posttrain.checkpointing.stopping import STOP_FILE
from posttrain.errors import ExitCode, reason_of
from posttrain.files import durable
from posttrain.files.run_folder_lock import ATTEMPTS_FOLDER, read_attempts

DRIVER = "driver"
MARGIN_S = 2.0  # of the time that is left: for the gang to end after the driver has
_CLOSE_S = 1.0  # for members to close their connections
_RAY_START_S = 120.0
MAX_FRUITLESS = 3  # attempts in a row without a new checkpoint, after which a run is not started again
_GIVEN_UP = "given_up.json"  # the last reported attempt; a relaunched run has new ones
_POLL_S = 0.2
# Codes of a driver that schedulers need not know: stopped by the doctor, which a restart does not fix; stopped by a
# signal with nothing to save.
_MEANINGS: dict[int, int] = {
    ExitCode.ERROR_FOUND: ExitCode.NO_PROGRESS,
    ExitCode.HANGUP: ExitCode.SAVED,
    ExitCode.TERMINATED: ExitCode.SAVED,
}


class HeadMember(Member):
    def __init__(self, settings: NodeSettings, environment: Mapping[str, str]) -> None:
        super().__init__(settings, environment)
        self.members: dict[int, Link] = {}  # by rank
        self.drivers: list[Link] = []  # under KubeRay
        self._waiting: list[Link] = []  # for the drivers to end, under KubeRay
        self._attempt = new_nonce()
        self._stop_file = self._ray_log.with_name("stop.json")
        self._is_stopping = False
        self._ending: int | None = None
        self._attempts_before = num_attempts(settings.checkpoint_dir)

    # -- beginning -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        settings = self.settings
        if not settings.is_kuberay and (why := why_no_progress(settings.checkpoint_dir)) is not None:
            self.end(ExitCode.NO_PROGRESS, why)
            return
        if settings.num_nodes == 1 and not settings.is_kuberay:  # nobody joins, so nothing listens
            self._start_driver({})
            return
        self._listener = Listener(
            settings.control_port,
            settings.secret,
            self._attempt,
            lambda link: self.later(partial(self._on_join, link)),
            self._pass_on,
            lambda link: self.later(partial(self._left, link)),
            self.say,
        )
        if settings.is_kuberay:
            self.start_ray(shlex.split(settings.ray_command.rpartition(";")[2]))
        else:
            self.at(time.monotonic() + JOIN_S, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        missing = [str(rank) for rank in range(1, self.settings.num_nodes) if rank not in self.members]
        if missing:
            self.end(ExitCode.SAVED, f"rank {', '.join(missing)} has not joined within {JOIN_S:.0f} s")

    def on_message(self, link: Link, message: Message) -> None:
        kind, rank = message["type"], self._rank_of(link)
        if rank is None:  # a driver, or a link that was refused: neither reports anything
            link.close()
        elif kind == "notice":
            left = None if message["seconds"] is None else as_seconds(message["seconds"])
            self.on_notice(Notice(f"rank {rank}: {message['source']}", left, message["is_final"] is True), link)
        elif kind == "failed":
            try:
                code = as_exit_code(message["code"], least=1)
            except ValueError:  # a failure never ends the run as if it were done
                code = ExitCode.CRASHED
            self.end(exit_code(code, is_stopping=self._is_stopping), f"rank {rank}: {message['why']}")

    def _rank_of(self, link: Link) -> int | None:
        return next((rank for rank, known in self.members.items() if known is link), None)

    def _on_join(self, link: Link) -> None:
        """The link has proved the secret. A rank that is there already may be the replacement of one whose machine is
        gone without a word: it is refused and tries again, and the silence of the old one ends this attempt.
        """
        if (why := self._why_refused(link.session.run, link.session.rank)) is not None:
            self.say(f"refused {link.peer_address}: {why}")
            link.send({"type": "refused", "why": why})
            link.close()
            return
        rank = link.session.rank
        if rank is None:  # KubeRay's
            rank = next(n for n in range(1, len(self.members) + 2) if n not in self.members)
        link.send({"type": "welcome", "rank": rank})
        if rank == DRIVER:
            self.drivers.append(link)
            if self._is_stopping:
                self._ask_drivers()
            return
        assert isinstance(rank, int)
        self.members[rank] = link
        self.say(f"rank {rank} has joined from {link.peer_address}")
        if not self.settings.is_kuberay and len(self.members) == self.settings.num_nodes - 1:
            self._start_ray_head(link.own_address)

    def _why_refused(self, run: str, rank: object) -> str | None:
        if self._ending is not None:
            return "this attempt is ending"
        if self.settings.is_kuberay:
            if rank == DRIVER:  # jobs of a Ray cluster have names of their own
                return None
            is_rank = rank is None
        else:
            is_rank = type(rank) is int and 0 < rank < self.settings.num_nodes
        if run != self.settings.run or not is_rank:
            return f"rank {rank!r} of {run!r} is not a part of {self.settings.run}"
        return f"rank {rank} has joined already" if rank in self.members else None

    def _start_ray_head(self, address: str) -> None:
        self.take_ray_token(self._attempt)
        port = self.settings.ray_port
        own = ["--head", f"--port={port}", f"--node-ip-address={address}", "--include-dashboard=false"]
        self.start_ray(["ray", "start", *own, *self.ray_options()])
        self._when_ray_answers(address, time.monotonic() + _RAY_START_S)

    def _when_ray_answers(self, address: str, limit: float) -> None:
        port = self.settings.ray_port
        if port_is_open(address, port):
            for link in self.members.values():
                link.send({"type": "go", "address": f"{address}:{port}"})
            self._start_driver({"RAY_ADDRESS": f"{address}:{port}"})
        elif time.monotonic() > limit:
            self.end(ExitCode.CRASHED, f"Ray's head has not answered at {address}:{port} for {_RAY_START_S:.0f} s")
        else:
            self.at(time.monotonic() + _POLL_S, partial(self._when_ray_answers, address, limit))

    def _start_driver(self, more: Mapping[str, str]) -> None:
        if self.code is not None or self._ending is not None:
            return
        self.children.start(
            DRIVER, driver_command(self.settings), {**self.environment, **more, STOP_FILE: str(self._stop_file)}
        )

    # -- interruptions -------------------------------------------------------------------------------------------------

    def on_notice(self, notice: Notice, link: Link | None = None) -> None:
        left = "" if notice.seconds is None else f", {notice.seconds:.0f} s left"
        self.say(f"{notice.source}{left}")
        if not notice.is_final:
            self.children.signal(DRIVER, signal.SIGUSR1)
            for driver in self.drivers:
                driver.send({"type": "save"})
            return
        seconds = self.settings.grace_s if notice.seconds is None else notice.seconds
        self.deadline = min(self.deadline, time.monotonic() + max(seconds - MARGIN_S, 0.0))
        self._is_stopping = True
        if self.settings.is_kuberay and link is not None:
            self._waiting.append(link)
        if not self.children.is_running(DRIVER) and not self.drivers:
            self._after_drivers("nothing was running")
            return
        write_stop(self._stop_file, self.deadline)
        self.children.signal(DRIVER, signal.SIGTERM)
        self._ask_drivers()
        self.at(self.deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._is_stopping and time.monotonic() >= self.deadline:
            self.end(ExitCode.SAVED, "the driver has not ended in the time that was left")

    def _ask_drivers(self) -> None:
        for driver in self.drivers:
            driver.send({"type": "stop", "seconds": max(self.deadline - time.monotonic(), 0.0)})

    def _after_drivers(self, why: str) -> None:
        """Under KubeRay only the machines that were told to end do so."""
        if not self.settings.is_kuberay or not self._waiting:
            self.end(ExitCode.SAVED, why)
            return
        for link in self._waiting:
            link.send({"type": "stop", "code": ExitCode.SAVED, "why": why})
        self._waiting, self._is_stopping, self.deadline = [], False, math.inf

    # -- ends ----------------------------------------------------------------------------------------------------------

    def on_end(self, name: str, code: int) -> None:
        known, words = (ExitCode.CRASHED, self.ray_output_tail()) if name == RAY else (code, "")
        self.end(exit_code(known, is_stopping=self._is_stopping), f"the {name} process ended with {code}{words}")

    def _left(self, link: Link) -> None:
        if link in self.drivers:
            self.drivers.remove(link)
            if self._is_stopping and not self.drivers:
                self._after_drivers("the driver has ended")
            return
        rank = next((rank for rank, known in self.members.items() if known is link), None)
        if rank is None:
            return
        del self.members[rank]
        if self._ending is not None:
            if not self.members:
                self.code = self._ending
        elif self.settings.is_kuberay:
            self.say(f"rank {rank} is gone")
            if link in self._waiting:
                self._waiting.remove(link)
            for driver in self.drivers:
                driver.send({"type": "kill", "why": f"rank {rank} is gone"})
        else:
            self.end(ExitCode.SAVED, f"rank {rank} is gone")

    def end(self, code: int, why: str) -> None:
        """Notify all members, and end once they have disconnected or after a short timeout."""
        if self._ending is not None:
            return
        if code == ExitCode.SAVED and not self.settings.is_kuberay:
            code = recorded_code(self.settings.checkpoint_dir, self._attempts_before, code)
        self._ending = code
        self.say(f"{why}; exit code {code}")
        self.children.signal(DRIVER, signal.SIGKILL)
        for link in self.members.values():
            link.send({"type": "stop", "code": code, "why": f"rank 0: {why}"})
        for driver in self.drivers:
            driver.send({"type": "kill", "why": why})
        if not self.members:
            self.code = code
        self.at(time.monotonic() + _CLOSE_S, partial(self._leave, code))

    def _leave(self, code: int) -> None:
        self.code = code


def exit_code(code: int, *, is_stopping: bool) -> int:
    """Of a gang whose driver ended with `code`. An interruption that did not let it save is no crash."""
    known = _MEANINGS.get(code, code)
    return (
        ExitCode.SAVED
        if is_stopping and known not in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NO_PROGRESS)
        else known
    )


def num_attempts(folder: Path) -> int:
    return max((attempt.number for attempt in read_attempts(folder)), default=0)


def recorded_code(folder: Path, attempts_before: int, code: int) -> int:
    """The exit code that a newer attempt than these recorded at its end, else `code`. A driver takes seconds to close
    down after that, and what happens to it then does not undo a run that is over."""
    codes = [attempt.exit_code for attempt in read_attempts(folder) if attempt.number > attempts_before]
    return code if not codes or codes[-1] is None else exit_code(codes[-1], is_stopping=True)


def driver_command(settings: NodeSettings) -> list[str]:
    return [sys.executable, "-m", "posttrain", settings.kind, "--config", str(settings.config)]


def write_stop(path: Path, deadline: float) -> None:
    """For the driver: when it must have ended, in seconds since 1970."""
    durable.write_text(path, json.dumps({"deadline": time.time() + deadline - time.monotonic()}))


def why_no_progress(folder: Path) -> str | None:
    """Why the run in `folder` should not be started again; None: it may. The same attempts are reported once."""
    marker = folder / ATTEMPTS_FOLDER / _GIVEN_UP
    counted = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        counted = int(json.loads(marker.read_text("utf-8"))["attempt"])
    last = [attempt for attempt in read_attempts(folder) if attempt.number > counted][-MAX_FRUITLESS:]
    if len(last) < MAX_FRUITLESS or any(a.first_checkpoint is not None or a.exit_code == 0 for a in last):
        return None
    numbers = ", ".join(str(attempt.number) for attempt in last)
    left = ""
    try:
        marker.write_text(json.dumps({"attempt": last[-1].number}) + "\n", encoding="utf-8")
    except OSError as error:
        left = f" ({marker} could not be written: {reason_of(error)})"
    return (
        f"attempts {numbers} of the run in {folder} made no new checkpoint, so it is not started again{left}. Their "
        "logs say why; if steps are longer than the machines live, make them shorter (fewer prompts per step), or take "
        "on-demand machines. Launch it again to try three more times"
    )
