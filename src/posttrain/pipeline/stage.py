"""The interface of a stage: its inputs, which make its key, and its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.config.pipeline import PipelineConfig
from posttrain.hashing import FileHashes
from posttrain.json_files import JsonObject
from posttrain.pipeline.records import Iteration, StageName, StageOutcome, StageRecord
from posttrain.roles import ShowProgress


@dataclass(frozen=True)
class StageContext:
    """The config, the iteration, the records of earlier stages, and the console."""

    config: PipelineConfig
    home: Path
    iteration: Iteration
    data: Sequence[str]  # content hashes of the trace files of this iteration
    before: Mapping[str, StageRecord]
    hashes: FileHashes
    say: Callable[[str], None]
    show_progress: ShowProgress
    heartbeat: Callable[[], None]  # called regularly: records the time of an attempt, in case it is killed
    quiet: bool = False
    lock: int | None = None  # descriptor, for a training to inherit


class Stage(Protocol):
    name: StageName
    version: int  # of the stage's code: raising it invalidates all cached outcomes
    reads: tuple[StageName, ...]  # stages whose outcome is read
    resumes: bool  # continues in the folder of a killed attempt; otherwise it starts with an empty one

    def check(self, config: PipelineConfig) -> None:
        """Raise for what is wrong with the file, before anything runs."""

    def inputs(self, context: StageContext) -> JsonObject:
        """What it reads besides other stages: settings, contents of files, identities of models."""

    def skip(self, context: StageContext) -> str | None:
        """Why there is nothing to do in this iteration; None if there is, or if it is not decided yet."""

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        """An output of a finished stage that no longer exists."""

    def work(self, context: StageContext, folder: Path) -> StageOutcome: ...


class Stop(Exception):
    """A stage ended early with a reason; the pipeline exits with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def missing_path(record: StageRecord, *names: str) -> str | None:
    """The first of these values whose path does not exist."""
    return next((str(record.path(name)) for name in names if not record.path(name).exists()), None)
