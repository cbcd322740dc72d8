"""The environments of a run behind one face: each task goes to the environment that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.environments.item import ScoringItem
from posttrain.environments.pool import ScoringPool
from posttrain.environments.settings import RewardConfigError, read_settings
from posttrain.roles import Progress
from posttrain.types import Completion, Score, Task


def build_environments(mapping: Any, base_folder: Path | None = None) -> ScoringRouter:
    """The environments of a config's `env:`. Functions given as files are found relative to `base_folder`.

    No process is started before there is something to score.
    """
    return ScoringRouter(
        {name: ScoringPool(settings) for name, settings in read_settings(mapping, base_folder).items()}
    )


class ScoringRouter:
    """Implements `roles.Environment` over any number of named environments."""

    def __init__(self, pools: Mapping[str, ScoringPool]) -> None:
        self.pools = dict(pools)

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        """One score per completion, in their order. `tasks[i]` is what `completions[i]` answers."""
        rows_of: dict[str, list[int]] = {}
        for row, task in enumerate(tasks):
            rows_of.setdefault(self._environment_of(task), []).append(row)
        scores: dict[int, Score] = {}
        items = [_item(task, completion) for task, completion in zip(tasks, completions, strict=True)]
        for name, rows in rows_of.items():
            scores.update(zip(rows, self.pools[name].score([items[row] for row in rows], progress), strict=True))
        return [scores[row] for row in range(len(items))]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()

    def __enter__(self) -> ScoringRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _environment_of(self, task: Task) -> str:
        if task.environment in self.pools:
            return task.environment
        if not task.environment and len(self.pools) == 1:
            return next(iter(self.pools))  # there is no other that it could mean
        known = ", ".join(sorted(self.pools)) or "none"
        raise RewardConfigError(f"task {task.id!r} names environment {task.environment!r}; under env: there is {known}")


def _item(task: Task, completion: Completion) -> ScoringItem:
    return ScoringItem(
        prompt=task.prompt,
        response=completion.text,
        reference=task.reference,
        messages=[dict(message) for message in task.messages],
        metadata=dict(task.metadata),
        noise_key=f"{task.draw}\0{completion.text}",
    )
