"""The interface of a stage: its inputs, which make its key, and its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.ship.pipeline.records import Iteration, StageName, StageOutcome, StageRecord
from posttrain.config.pipeline import PipelineConfig
from posttrain.files.digests import FileHashes
from posttrain.files.json_files import JsonMapping, JsonObject
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


class Stage(ABC):
    name: StageName
    version: int = 1  # of the stage's code: raising it invalidates all cached outcomes
    reads: tuple[StageName, ...] = ()  # stages whose outcome is read
    resumes: bool = False  # continues in the folder of a killed attempt; otherwise it starts with an empty one
    outputs: tuple[str, ...] = ()  # values of the outcome that are paths and must exist for it to be reused

    def check(self, config: PipelineConfig) -> None:  # noqa: B027 - most errors show when the file is read
        """Raise for what is wrong with the file, before anything runs."""

    @abstractmethod
    def inputs(self, context: StageContext) -> JsonObject:
        """What it reads besides other stages: settings, contents of files, identities of models."""

    def same_settings(self, context: StageContext, old: JsonMapping, new: JsonMapping) -> bool:
        """Whether settings that another version of posttrain recorded mean the same as those of this one."""
        return old == new

    def skip(self, context: StageContext) -> str | None:
        """Why there is nothing to do in this iteration; None if there is, or if it is not decided yet."""
        return None

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        """An output of a finished stage that no longer exists."""
        paths = (record.path(name) for name in self.outputs)
        return next((str(path) for path in paths if not path.exists()), None)

    @abstractmethod
    def work(self, context: StageContext, folder: Path) -> StageOutcome: ...


class Stop(Exception):
    """A stage ended early with a reason; the pipeline exits with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
