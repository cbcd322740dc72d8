"""What a stage of the pipeline is, and what it gets."""

from __future__ import annotations

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


def outputs_exist(stage: Stage, record: StageRecord, config: PipelineConfig) -> str | None:
    paths = (record.path(name) for name in stage.outputs)
    return next((str(path) for path in paths if not path.exists()), None)


@dataclass
class Stage:
    """A command of the pipeline: what it reads, which makes its key, how it runs, and what it writes."""

    name: StageName
    inputs: Callable[
        [StageContext], JsonObject
    ]  # besides other stages: settings, contents of files, identities of models
    work: Callable[[StageContext, Path], StageOutcome]  # in its folder
    reads: tuple[StageName, ...] = ()  # stages whose outcome is read
    outputs: tuple[str, ...] = ()  # values of the outcome that are paths and must exist for it to be reused
    version: int = 1  # of the stage's code: raising it invalidates all cached outcomes
    resumes: bool = False  # continues in the folder of a killed attempt; otherwise it starts with an empty one
    # Raises for what is wrong with the file, before anything runs.
    check: Callable[[PipelineConfig], None] = lambda config: None
    # Why there is nothing to do in this iteration; None if there is, or if it is not decided yet.
    skip: Callable[[StageContext], str | None] = lambda context: None
    # An output of a finished stage that no longer exists.
    missing: Callable[[Stage, StageRecord, PipelineConfig], str | None] = outputs_exist
    # Whether settings that another version of posttrain recorded mean the same as those of this one.
    same_settings: Callable[[PipelineConfig, JsonMapping, JsonMapping], bool] = lambda config, old, new: old == new


class Stop(Exception):
    """A stage ended early with a reason; the pipeline exits with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
