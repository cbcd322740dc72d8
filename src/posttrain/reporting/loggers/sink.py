"""The interface of a tracker, and the values that it gets. Each tracker has a file of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.run_files import LOGGERS_FOLDER

TABLE = "rollouts"  # what a tracker calls the table of answers
TABLE_COLUMNS = ("step", "prompt", "answer", "reward", "advantage", "finish_reason", "error")


class LoggerProblem(Exception):
    """The tracker cannot be used now; the message gives the reason and, where there is one, the remedy."""


@dataclass(frozen=True)
class RecordedRun:
    """The run that a tracker shows."""

    folder: Path
    id: str  # stays when the run is resumed
    title: str
    settings: Mapping[str, object]  # of its config, by their dotted keys, without credentials

    @property
    def name(self) -> str:
        """What it is called if the config does not say: the last parts of its folder."""
        return "/".join(self.folder.absolute().parts[-2:])

    def place(self, tool: str) -> Path:
        """A folder for the files of a tracker."""
        path = self.folder / LOGGERS_FOLDER / tool
        path.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class LoggedStep:
    """One row of metrics.jsonl: numbers, and some answers as rows of TABLE_COLUMNS."""

    step: int
    values: Mapping[str, float]
    answers: Sequence[Sequence[object]] = ()


class Sink(Protocol):
    """A connection to a tracker. Every method may raise; then the connection is closed and opened again later."""

    def open(self, run: RecordedRun) -> int | None:
        """Connect. Returns the last step that the tracker has of this run; None: it has none, all of them are sent."""

    def send(self, steps: Sequence[LoggedStep]) -> None:
        """In order, all after the last that it has."""

    def alert(self, finding: Finding) -> None:
        """Something that the doctor found."""

    def close(self, *, is_finished: bool) -> None:
        """`is_finished`: the run has all its steps."""
