"""The doctor beside a run: looks at every row, writes what it finds to `findings.jsonl`, and reads it back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.config.tree import dotted, leaves, without_marks
from posttrain.config.yaml_files import parse_document
from posttrain.files.json_files import MAX_FILE_BYTES, JsonMapping, read_at_most
from posttrain.reporting.doctor import Doctor, Finding
from posttrain.reporting.doctor.findings import answers_that_show
from posttrain.reporting.rows import group_row
from posttrain.reporting.run_data import RunData, groups_of, load_run
from posttrain.reporting.run_files import (
    FINDINGS_FILE,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    Row,
    append_rows,
    newest_config,
    read_rows,
)

if TYPE_CHECKING:
    from posttrain.types import Group


DEFAULT_KIND = "grpo"  # of a run that does not say


class Examination:
    """Of the run that is being recorded in `folder`."""

    def __init__(self, folder: Path, kind: str, settings: Mapping[str, object]) -> None:
        self._folder = folder
        self._doctor = Doctor(kind, settings)

    @property
    def findings(self) -> list[Finding]:
        """The worst of each rule, the worst first."""
        return self._doctor.findings

    def resume(self) -> None:
        """Look at the rows of the steps so far again: their findings have been reported."""
        self._doctor.replay(read_rows(self._folder / METRICS_FILE))

    def examine(self, row: Row, groups: Sequence[Group]) -> list[Finding]:
        """What is new at this step. It is on disk when this returns."""
        return self._keep(self._doctor.observe(row), groups)

    def finish(self) -> list[Finding]:
        """Findings about the whole run, when it is over."""
        return self._keep(self._doctor.finish(), ())

    def _keep(self, findings: Sequence[Finding], groups: Sequence[Group]) -> list[Finding]:
        if not findings:
            return []
        rows = [group_row(group) for group in groups]
        shown = [replace(found, answers=answers_that_show(rows, self._doctor.shown[found.rule])) for found in findings]
        append_rows(self._folder / FINDINGS_FILE, [found.to_json() for found in shown])
        return shown


def examine(
    rows: Iterable[Row],
    kind: str,
    settings: Mapping[str, object],
    groups: Callable[[int], Sequence[JsonMapping]],
    names: Mapping[str, str] | None = None,
) -> list[Finding]:
    """What the doctor finds in all rows of a run. `groups` reads those of a step; `names` are for `Doctor`."""
    doctor = Doctor(kind, settings, names)
    doctor.replay(rows)
    doctor.finish()
    return [
        replace(finding, answers=answers_that_show(groups(finding.step), doctor.shown[finding.rule]))
        for finding in doctor.findings
    ]


def examine_folder(folder: Path) -> tuple[RunData, list[Finding]]:
    """A run after the fact, from its rows alone: also one that was recorded without the doctor."""
    run = load_run(folder)
    kind = str(run.info.get("algorithm", DEFAULT_KIND))
    files = folder / ROLLOUTS_FOLDER
    return run, examine(run.rows, kind, settings_of(folder), lambda step: groups_of(files / f"step_{step}.jsonl.gz"))


def errors_of_model(reference: str) -> list[Finding]:
    """The errors that the doctor found in the run that made a model: a run folder, or a checkpoint step_N in one.

    Of a checkpoint, those found up to its step. None for every other name.
    """
    path = Path(reference)
    match = re.fullmatch(r"step_(\d+)", path.name)
    folder, last_step = (path.parent, int(match[1])) if match else (path, None)
    found = [Finding.from_json(row) for row in read_rows(folder / FINDINGS_FILE)]
    return [one for one in found if one.severity == "error" and (last_step is None or one.step <= last_step)]


def settings_of(folder: Path) -> dict[str, object]:
    """The settings that the newest steps were trained with, by their dotted keys; none if the file cannot be read."""
    path = newest_config(folder)
    try:
        values = without_marks(parse_document(read_at_most(path, MAX_FILE_BYTES), path.name).values)
    except (OSError, ValueError):
        return {}
    return {dotted(key): value for key, value in leaves(values)}
