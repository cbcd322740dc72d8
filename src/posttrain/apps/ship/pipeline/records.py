"""The records of a pipeline on disk: `stage.json` of each finished stage, `iteration.json` of each iteration.

    FOLDER/iteration_2/iteration.json          the data and the models that it began with, and the stages so far
    FOLDER/iteration_2/train-3fa9c1d2e0b4/     one stage; the name ends with the key of what it reads
    FOLDER/iteration_2/train-…/stage.json      written last: it marks the stage as finished
    FOLDER/evaluations/main-…/                 answers, shared by all iterations

Paths in a record are relative to the folder of the record, so a pipeline's folder can be moved.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from posttrain.config.base import parse_as
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonMapping, read_json

STAGE_FILE = "stage.json"
ITERATION_FILE = "iteration.json"
ITERATION_FOLDER = re.compile(r"iteration_(\d+)")

StageName = Literal["traces", "dataset", "train", "convert", "evaluate", "gate", "registry", "canary"]
STAGES: tuple[StageName, ...] = get_args(StageName)


@dataclass(frozen=True)
class StageOutcome:
    """The result of a stage. `digest` is of its content: outcomes with equal digests are interchangeable."""

    digest: str
    headline: str  # one line for the console and the page
    values: JsonMapping = field(default_factory=dict)  # what later stages and the KPI need
    report: str | None = None  # an HTML or SVG file; relative to the stage's folder


@dataclass(frozen=True)
class StageRecord:
    stage: StageName
    key: str
    inputs: JsonMapping  # the key is a hash of these; kept to show what changed
    outcome: StageOutcome
    seconds: float  # over all attempts
    finished_at: str
    code_version: str
    folder: Path

    def path(self, name: str) -> Path:
        """A path among the outcome's values."""
        return Path(os.path.normpath(self.folder / str(self.outcome.values[name])))

    @property
    def report(self) -> Path | None:
        return None if self.outcome.report is None else Path(os.path.normpath(self.folder / self.outcome.report))

    def write(self) -> None:
        row = {name: value for name, value in asdict(self).items() if name != "folder"}
        durable.write_text(self.folder / STAGE_FILE, json.dumps(row, indent=2, default=str) + "\n")


def read_stage(folder: Path) -> StageRecord | None:
    """The record of a finished stage; None if it is not finished."""
    file = folder / STAGE_FILE
    if not file.is_file():
        return None
    try:
        return parse_as(StageRecord, {**read_json(file), "folder": folder}, str(file))
    except InputError as error:
        raise InputError(f"{error}; not the record of a stage: remove its folder to run it again") from None


def relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.absolute(), folder.absolute())


# -- iterations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelChoice:
    """A model that an iteration starts from, or is compared with, as it was when the iteration began."""

    text: str  # registry:NAME@3, or the base model as the file names it
    identity: str  # of its content
    version: int | None = None  # in the registry


@dataclass(frozen=True)
class StageMark:
    """A stage of an iteration: done in `folder`, or skipped with a reason."""

    folder: str | None = None  # relative to the pipeline's folder
    reused: bool = False  # made by an earlier iteration
    skipped: str | None = None
    outdated: bool = False  # a stage before it has run again since, and this one has not yet


@dataclass(frozen=True)
class Iteration:
    number: int
    folder: Path
    begun_at: str
    data: str  # digest of the traces' content
    start: ModelChoice
    start_why: str
    incumbent: ModelChoice | None  # what the candidate is compared with
    redone: Mapping[str, int] = field(default_factory=dict)  # stage -> how often it was rerun with --from
    running: str | None = None  # the stage under way, or where it stopped
    finished: bool = False
    stages: Mapping[str, StageMark] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder.parent

    def running_stage(self, stage: StageName) -> Iteration:
        """`stage` is about to run: its outcome and those of later stages become outdated."""
        later = STAGES[STAGES.index(stage) :]
        stages = {name: replace(mark, outdated=mark.outdated or name in later) for name, mark in self.stages.items()}
        return replace(self, running=stage, finished=False, stages=stages)

    def record(self, stage: str, *, outdated: bool = False) -> StageRecord | None:
        """Of a stage that is finished in this iteration; with `outdated`, also if its outcome is outdated."""
        mark = self.stages.get(stage)
        if mark is None or mark.folder is None or (mark.outdated and not outdated):
            return None
        return read_stage(self.home / mark.folder)

    def write(self) -> None:
        durable.make_folder(self.folder)
        row = {name: value for name, value in asdict(self).items() if name != "folder"}
        durable.write_text(self.folder / ITERATION_FILE, json.dumps(row, indent=2) + "\n")


def read_iterations(home: Path) -> list[Iteration]:
    """All that have begun, the oldest first."""
    numbers = sorted(
        int(found[1]) for path in home.glob("iteration_*") if (found := ITERATION_FOLDER.fullmatch(path.name))
    )
    folders = [home / f"iteration_{number}" for number in numbers]
    files = [folder / ITERATION_FILE for folder in folders]
    return [
        parse_as(Iteration, {**read_json(file), "folder": file.parent}, str(file)) for file in files if file.is_file()
    ]


def find_finished(home: Path, stage: StageName, key: str) -> StageRecord | None:
    """The newest finished stage with this key, in any iteration."""
    for iteration in reversed(read_iterations(home)):
        record = read_stage(iteration.folder / stage_folder(stage, key))
        if record is not None and record.key == key:
            return record
    return None


def stage_folder(stage: StageName, key: str) -> str:
    return f"{stage}-{key[:12]}"


def key_of(inputs: JsonMapping) -> str:
    return digest(inputs)
