"""Trackers beside the run folder: which ones a run has, and how its rows get there. Clients are imported late."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from posttrain.config.run_config import LoggerConfig
from posttrain.files.digests import sha256_of
from posttrain.reporting.examination import settings_of
from posttrain.reporting.loggers.follower import Follower
from posttrain.reporting.loggers.sink import RecordedRun, Sink
from posttrain.reporting.run_files import read_info

RECORD_ID = "record_id"  # in run.json: what trackers know a run by
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")  # each has a module, and in it a NameSink


def recorded_run(folder: Path, settings: Mapping[str, object] | None = None) -> RecordedRun:
    """The run in a folder. `settings`: those of its config, if available."""
    info = read_info(folder)
    known_by = info.get(RECORD_ID) or sha256_of(str(info.get("started_at", folder)))[:12]
    return RecordedRun(folder, str(known_by), str(info.get("title") or folder.name), settings or settings_of(folder))


def make_sink(tool: str, config: LoggerConfig) -> Sink:
    """TensorBoard has no section of settings."""
    sink = getattr(import_module(f"posttrain.reporting.loggers.{tool}"), f"{tool.capitalize()}Sink")
    made: Sink = sink(getattr(config, tool)) if tool != "tensorboard" else sink()
    return made


def missing_client(tool: str) -> str:
    """What to install; empty if the client is there."""
    return "" if find_spec(tool) is not None else f"{tool} is not installed: pip install 'posttrain[{tool}]'"


class Loggers:
    """The trackers of a run that is being recorded."""

    def __init__(self, config: LoggerConfig) -> None:
        self._config = config
        self._followers: list[Follower] = []
        self._folder = Path()

    def start(self, run: RecordedRun) -> list[str]:
        """A line for each tracker whose client is missing."""
        self._folder = run.folder
        missing = []
        for tool in (tool for tool in TRACKERS if getattr(self._config, f"{tool}_enabled")):
            if problem := missing_client(tool):
                later = f"then `posttrain log sync {run.folder} --to {tool}` sends the steps"
                missing.append(f"logger.{tool}_enabled: {problem}; {later}")
                continue
            make = partial(make_sink, tool, self._config)
            self._followers.append(Follower(tool, make, run, num_answers=self._config.num_rollouts_to_log))
        for follower in self._followers:
            follower.start()
        return missing

    def wake(self) -> list[str]:
        """There is a new row. Returns a line for each tracker that cannot be reached."""
        for follower in self._followers:
            follower.wake()
        return [line for follower in self._followers for line in follower.warnings()]

    def finish(self, *, is_finished: bool, limit_s: float) -> list[str]:
        """Send what is left, within `limit_s` in all; a line for each tracker that does not have everything."""
        for follower in self._followers:
            follower.end(is_finished=is_finished)
        end = time.monotonic() + limit_s
        return [
            f"logger {follower.name} does not have all steps ({follower.problem}); "
            f"`posttrain log sync {self._folder} --to {follower.name}` sends the rest"
            for follower in self._followers
            if not follower.has_ended(max(0.0, end - time.monotonic()))
        ]
