"""A run folder as views read it: rows merged by step, the series of one metric, the files of samples.

Reading works in every state of a run: young, still being written, killed, or written by an older version.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from posttrain.files.json_files import MAX_FILE_BYTES, JsonMapping, parse_json, read_at_most, refuse_pipe
from posttrain.reporting.doctor.findings import Finding, kept_findings, up_to_date
from posttrain.reporting.presentation import Headline, headline_from_json
from posttrain.reporting.rows import TOTAL_STEP, TOTAL_VALIDATION, top_level_stages
from posttrain.reporting.run_files import (
    FINDINGS_FILE,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    UNSCORED_FILE,
    Row,
    config_files,
    read_info,
    read_rows,
    rollout_step,
)

MAX_ROLLOUT_BYTES = 512 * 2**20  # of one step's answers that a report or an examination reads, unpacked
MAX_ANSWERS = 16_384  # of one group
BYTES_OF_A_VALUE = 100  # that a list or an object takes beyond its text


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged; None where it was not finite."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    smooth: bool = True  # false for validations, which are sparse, and schedules, which have no noise

    @property
    def is_empty(self) -> bool:
        return all(value is None for value in self.values)

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True)
class RunData:
    folder: Path
    rows: Sequence[Row]  # one per step, in order; every value is a number or None
    info: JsonMapping  # run.json
    configs: Mapping[str, str]  # the text of every config file of the run, by its name, the first one first
    unscored: Sequence[Row]
    findings: Sequence[Finding] = ()  # of the doctor, the worst first

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Every key of any row, in order of appearance."""
        found: dict[str, None] = {}
        for row in self.rows:
            found.update(dict.fromkeys(row))
        return tuple(key for key in found if key != "step")

    def series(self, key: str, name: str = "") -> Series:
        rows = [row for row in self.rows if key in row]
        smooth = not key.startswith(("validation", "train/lr"))
        return Series(name or key, [row["step"] for row in rows], [row[key] for row in rows], smooth)

    @cached_property
    def headline(self) -> Headline:
        return headline_from_json(self.info.get("headline"), self.keys)

    @property
    def is_sick(self) -> bool:
        """Whether the doctor found an error."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def title(self) -> str:
        return str(self.info.get("title") or self.folder.resolve().name)

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The training stages that add up to a step, the one that takes longest first."""
        prefix, seconds = "timing/train/", Counter[str]()
        for row in self.rows:
            timings = {key.removeprefix(prefix): value or 0.0 for key, value in row.items() if key.startswith(prefix)}
            seconds.update(top_level_stages(timings))
        return tuple(stage for stage, _ in seconds.most_common())

    @property
    def logged_seconds(self) -> float:
        """Time of all training steps and validations, over all processes of the run."""
        totals = (f"timing/train/{TOTAL_STEP}", f"timing/validation/{TOTAL_VALIDATION}")
        return float(sum(row.get(key) or 0.0 for row in self.rows for key in totals))

    def rollout_files(self, *, validation: bool = False) -> list[Path]:
        """The rollout files of training or of validation, in order of their steps."""
        files = (self.folder / ROLLOUTS_FOLDER).glob("validation_step_*.gz" if validation else "step_*.gz")
        return sorted(
            (path for path in files if rollout_step(path) is not None), key=lambda path: rollout_step(path) or 0
        )


def load_run(folder: Path) -> RunData:
    info = read_info(folder)
    return RunData(
        folder=folder,
        rows=_merged_by_step(read_rows(folder / METRICS_FILE)),
        info=info,
        configs={
            path.name: read_at_most(path, MAX_FILE_BYTES).decode("utf-8", "replace")
            for path in config_files(folder).values()
        },
        unscored=read_rows(folder / UNSCORED_FILE),
        findings=up_to_date(kept_findings(read_rows(folder / FINDINGS_FILE)), info),
    )


def _merged_by_step(rows: Sequence[Row]) -> list[Row]:
    """One row per step, numbers or None: a validation of its own may have been logged next to the step's row."""
    merged: dict[int, Row] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(
            # Larger numbers are more than the arithmetic of charts can handle.
            {key: v if isinstance(v, int | float) and abs(v) < 1e100 else None for key, v in row.items()}
        )
    return [merged[step] for step in sorted(merged)]


def groups_of(path: Path) -> list[Row]:
    """The groups in a rollout file, of a very large one the first; none if it cannot be read."""
    found, left = [], MAX_ROLLOUT_BYTES
    try:
        refuse_pipe(path)
        with gzip.open(path, "rb") as lines:
            while line := lines.readline(left):
                left -= len(line) + BYTES_OF_A_VALUE * (line.count(b"{") + line.count(b"["))
                if left <= 0:
                    break
                found.append(parse_json(line))
    except (OSError, ValueError, EOFError, zlib.error):
        return []
    return [group for group in found if is_group(group)]


def is_group(row: object) -> TypeGuard[Row]:
    """Whether a row of a rollout file has the types that a run writes."""
    answers = row.get("completions") if isinstance(row, dict) else None
    return (
        isinstance(row, dict)
        and isinstance(row.get("prompt", ""), str)
        and isinstance(answers, list)
        and len(answers) <= MAX_ANSWERS
        and all(isinstance(answer, dict) and _is_answer(answer) for answer in answers)
    )


def _is_answer(answer: Row) -> bool:
    turns = answer.get("turns")
    return (
        is_number(answer.get("reward"))
        and is_number(answer.get("num_tokens"))
        and isinstance(answer.get("text", ""), str)
        and (turns is None or (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)))
    )


def is_number(value: object) -> bool:
    """Or none. The sum of larger ones is no float."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and not 1e100 < abs(value) < math.inf
    )
