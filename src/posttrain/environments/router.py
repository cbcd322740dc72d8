"""Routes each task to the environment that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.environments.combined import build_environment, interrupt
from posttrain.environments.settings import read_settings
from posttrain.errors import InputError
from posttrain.roles import Environment, Progress
from posttrain.types import Completion, Score, Task


def build_environments(mapping: Any, base_folder: Path | None = None) -> ScoringRouter:
    """The environments of a config's `env:`. Functions given as files are found relative to `base_folder`.

    No process is started before there is something to score.
    """
    settings = read_settings(mapping, base_folder)
    return ScoringRouter({name: build_environment(environment) for name, environment in settings.items()})


class ScoringRouter:
    """Implements `roles.Environment` over any number of named environments."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self.environments = dict(environments)

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        """One score per completion, in their order. `tasks[i]` is what `completions[i]` answers."""
        assert len(tasks) == len(completions), "one task for each completion"
        rows_of: dict[str, list[int]] = {}
        for row, task in enumerate(tasks):
            rows_of.setdefault(self._environment_of(task), []).append(row)
        scores: dict[int, Score] = {}
        for name, rows in rows_of.items():
            found = self.environments[name].score(
                [tasks[row] for row in rows], [completions[row] for row in rows], progress
            )
            scores.update(zip(rows, found, strict=True))
        return [scores[row] for row in range(len(tasks))]

    def interrupt(self) -> None:
        """Callable from any thread: a running `score` ends with StopRequested within half a second."""
        for environment in self.environments.values():
            interrupt(environment)

    def close(self) -> None:
        for environment in self.environments.values():
            environment.close()

    def __enter__(self) -> ScoringRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _environment_of(self, task: Task) -> str:
        if task.environment in self.environments:
            return task.environment
        if not task.environment and len(self.environments) == 1:
            return next(iter(self.environments))  # the only one
        known = ", ".join(sorted(self.environments)) or "none"
        raise InputError(f"task {task.id!r} names environment {task.environment!r}; under env: there is {known}")
