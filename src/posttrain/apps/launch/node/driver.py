"""`posttrain node driver`: the entrypoint of a RayJob, and of a job of a RayCluster. Ray starts it in the head's pod;
it runs the driver, follows the head's `posttrain node`, and ends with the driver's exit code, or with 85 after an
interruption.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from functools import partial

from posttrain.apps.launch.node.contract import NodeSettings
from posttrain.apps.launch.node.control import Link
from posttrain.apps.launch.node.head import (
    DRIVER,
    driver_command,
    exit_code,
    num_attempts,
    recorded_code,
    why_no_progress,
    write_stop,
)
from posttrain.apps.launch.node.member import Member
from posttrain.apps.launch.node.notices import Notice
from posttrain.apps.launch.node.session import Message, as_seconds
from posttrain.checkpointing.stopping import STOP_FILE
from posttrain.errors import ExitCode


class DriverMember(Member):
    """It runs on the machine of the head, which checks and watches that machine."""

    def __init__(self, settings: NodeSettings, environment: Mapping[str, str]) -> None:
        super().__init__(settings, environment)
        self.joins_as = DRIVER
        self._is_stopping = False
        self._attempts_before = num_attempts(settings.checkpoint_dir)
        self._stop_file = self._ray_log.with_name("stop.json")

    def say(self, text: str) -> None:
        print(f"posttrain node driver: {text}", flush=True)

    def _begin(self) -> None:
        if (why := why_no_progress(self.settings.checkpoint_dir)) is not None:
            self.end(ExitCode.NO_PROGRESS, why)
            return
        self.begin()

    def _on_welcome(self, link: Link, welcome: Message) -> None:
        link.start()
        environment = {**self.environment, STOP_FILE: str(self._stop_file)}
        self.children.start(DRIVER, driver_command(self.settings), environment)

    def on_message(self, link: Link, message: Message) -> None:
        kind = message["type"]
        if kind == "stop":
            self.on_notice(Notice("interruption", as_seconds(message["seconds"]), is_final=True))
        elif kind == "save":
            self.children.signal(DRIVER, signal.SIGUSR1)
        elif kind == "kill":
            self.end(ExitCode.SAVED, str(message["why"]))

    def on_notice(self, notice: Notice) -> None:
        assert notice.seconds is not None
        self._is_stopping = True
        self.deadline = min(self.deadline, time.monotonic() + notice.seconds)
        write_stop(self._stop_file, self.deadline)
        self.children.signal(DRIVER, signal.SIGTERM)
        self.at(self.deadline, partial(self.end, ExitCode.SAVED, "the driver has not ended in the time that was left"))

    def on_end(self, name: str, code: int) -> None:
        self.end(exit_code(code, is_stopping=self._is_stopping), f"the driver ended with {code}")

    def end(self, code: int, why: str) -> None:
        if code == ExitCode.SAVED:
            code = recorded_code(self.settings.checkpoint_dir, self._attempts_before, code)
        super().end(code, why)
