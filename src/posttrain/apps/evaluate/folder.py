"""Writes an evaluation such that `kill -9` at any time loses at most the problems in progress.

Finished problems are appended and fsynced in batches. A restart cuts off a torn last line, compares the identity of the
evaluation, and reads which problems are finished. The format is in `results.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.apps.evaluate.identity import plain_identity, what_differs
from posttrain.apps.evaluate.results import (
    CONFIG_FILE,
    IDENTITY_FILE,
    PROBLEMS_FILE,
    SUMMARY_FILE,
    EvaluationError,
    ProblemResult,
    problem_row,
    read_problems,
)
from posttrain.errors import place_and_reason
from posttrain.files.durable import append, cut_torn_line, make_folder, write_text
from posttrain.files.json_files import read_json
from posttrain.files.locks import locked
from posttrain.files.redaction import redact_values

TIMINGS_FILE = "timings.jsonl"  # one row per batch of problems: time and tokens, over all attempts
LOCK_FILE = ".lock"


@dataclass
class EvaluationFolder:
    """Open for writing, by this process alone. `finished` are the problems that are on the disk."""

    path: Path
    identity: Mapping[str, object]
    finished: dict[str, ProblemResult] = field(default_factory=dict)
    _lock: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, object], config_yaml: str) -> EvaluationFolder:
        if path.exists() and not path.is_dir():
            raise EvaluationError(f"eval.save_path: {path} is a file; a folder is needed")
        try:
            make_folder(path)
            lock = ExitStack()
            busy = f"{path}: {{holder}} is evaluating into this folder; wait for it, or set eval.save_path"
            lock.enter_context(locked(path / LOCK_FILE, wait_s=0, refusal=busy))
        except OSError as error:
            raise EvaluationError(
                f"eval.save_path: {path} cannot be written ({place_and_reason(error)}); choose another folder"
            ) from error
        folder = cls(path, plain_identity(identity), _lock=lock)
        try:
            folder._compare_identity()
            for name in (PROBLEMS_FILE, TIMINGS_FILE):
                cut_torn_line(path / name)
            if (path / PROBLEMS_FILE).exists():
                folder.finished = {problem.id: problem for problem in read_problems(path)}
        except BaseException:
            lock.close()
            raise
        write_text(path / CONFIG_FILE, config_yaml, redact_values)
        return folder

    def _compare_identity(self) -> None:
        file, problems = self.path / IDENTITY_FILE, self.path / PROBLEMS_FILE
        if not file.exists() and problems.exists():
            raise EvaluationError(f"{self.path}: has {PROBLEMS_FILE} without {IDENTITY_FILE}; choose another folder")
        differing = what_differs(read_json(file, EvaluationError), self.identity) if file.exists() else "new"
        if not differing:
            return
        if problems.exists() and problems.stat().st_size:
            raise EvaluationError(f"{self.path} holds another evaluation: {differing}. Choose another eval.save_path")
        # Otherwise an attempt failed before it finished any problem.
        write_text(file, json.dumps(self.identity, indent=2) + "\n")

    def forget_unscored(self) -> int:
        """Drop the problems some of whose samples have no reward, so that they are tried again; how many."""
        kept = [p for p in self.finished.values() if all(reward is not None for reward in p.rewards)]
        dropped = len(self.finished) - len(kept)
        if dropped:
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            rows = "".join(_line(problem_row(problem)) for problem in kept)
            write_text(self.path / PROBLEMS_FILE, rows, redact_values)
            self.finished = {problem.id: problem for problem in kept}
        return dropped

    def append(self, problems: Sequence[ProblemResult], timing: Mapping[str, float]) -> None:
        """The problems are on the disk when this returns."""
        new = [problem for problem in problems if problem.id not in self.finished]
        for name, rows in ((PROBLEMS_FILE, map(problem_row, new)), (TIMINGS_FILE, [timing])):
            append(self.path / name, "".join(map(_line, rows)).encode("utf-8", "backslashreplace"))
        self.finished.update({problem.id: problem for problem in new})

    def timings(self) -> dict[str, float]:
        """Sums over all batches of all attempts."""
        file = self.path / TIMINGS_FILE
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {name: sum(row.get(name, 0.0) for row in rows) for name in {key for row in rows for key in row}}

    def close(self) -> None:
        self._lock.close()


def _line(row: Mapping[str, object]) -> str:
    return redact_values(json.dumps(row, allow_nan=False, default=str)) + "\n"
