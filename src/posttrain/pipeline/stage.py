"""What a stage is: what it reads, which makes its key, and what it does. The order of stages is not known here."""

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
    """What a stage is given: the file, the iteration, the stages before it, and ways to talk to the user."""

    config: PipelineConfig
    home: Path
    iteration: Iteration
    data: Sequence[str]  # contents of the files of traces that this iteration is about
    before: Mapping[str, StageRecord]
    hashes: FileHashes
    say: Callable[[str], None]
    show_progress: ShowProgress
    heartbeat: Callable[[], None]  # to be called now and then: keeps the time of an attempt that is killed
    quiet: bool = False
    lock: int | None = None  # descriptor, for a training to inherit


class Stage(Protocol):
    name: StageName
    version: int  # of the stage's code: another number makes everything that was cached be done again
    reads: tuple[StageName, ...]  # stages whose outcome is read
    goes_on: bool  # continues in the folder of an attempt that was killed; otherwise it begins with an empty one

    def check(self, config: PipelineConfig) -> None:
        """Raise for what is wrong with the file, before anything runs."""

    def inputs(self, context: StageContext) -> JsonObject:
        """What it reads besides other stages: settings, contents of files, identities of models."""

    def skip(self, context: StageContext) -> str | None:
        """Why there is nothing to do in this iteration; None if there is, or if that cannot be told yet."""

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        """What a finished stage has made and is not there any more."""

    def work(self, context: StageContext, folder: Path) -> StageOutcome: ...


class Stop(Exception):
    """A stage has ended early, in good order, and said why: the pipeline ends with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def missing_path(record: StageRecord, *names: str) -> str | None:
    """The first of these values whose path is not there."""
    return next((str(record.path(name)) for name in names if not record.path(name).exists()), None)
