"""What a stage of the pipeline is, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.ship.pipeline.records import Iteration, StageName, StageOutcome, StageRecord
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
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
    heartbeat: Callable[[], None] = lambda: None  # called regularly: records the time of an attempt, if it is killed
    quiet: bool = False
    lock: int | None = None  # descriptor, for a training to inherit


class Stage:
    """A command of the pipeline: what it reads, which makes its key, how it runs, and what it writes."""

    name: StageName
    reads: tuple[StageName, ...] = ()  # stages whose outcome is read
    outputs: tuple[str, ...] = ()  # values of the outcome that are paths and must exist for it to be reused
    version = 1  # of the stage's code: raising it invalidates all cached outcomes
    resumes = False  # continues in the folder of a killed attempt; otherwise it starts with an empty one

    def check(self, config: PipelineConfig) -> None:
        """Raises for what is wrong with the file, before anything runs."""

    def inputs(self, context: StageContext) -> JsonObject:
        """Besides other stages: settings, contents of files, identities of models."""
        raise NotImplementedError

    def skip(self, context: StageContext) -> str | None:
        """Why there is nothing to do in this iteration; None if there is, or if it is not decided yet."""
        return None

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        """Run, and write to `folder`."""
        raise NotImplementedError

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        """An output of a finished stage that no longer exists."""
        paths = (record.path(name) for name in self.outputs)
        return next((str(path) for path in paths if not path.exists()), None)

    def same_settings(self, config: PipelineConfig, old: JsonMapping, new: JsonMapping) -> bool:
        """Whether settings that another version of posttrain recorded mean the same as those of this one."""
        return old == new


class Stop(Exception):
    """A stage ended early with a reason; the pipeline exits with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@contextmanager
def about(name: str) -> Iterator[None]:
    """An InputError inside begins with the field of pipeline.yaml that led to it."""
    try:
        yield
    except InputError as error:
        overrides = f"{name}.overrides"  # messages about the command line mean this list here
        lines = (line.replace("command line", overrides, 1) for line in str(error).splitlines())
        shown = (line if line.startswith(overrides) else f"{name}: {line}" for line in lines)
        raise InputError("\n".join(shown)) from error
