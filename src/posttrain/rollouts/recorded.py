"""Groups from a record: answers that were given and judged elsewhere, handed out again as if they had just been sampled.

The sampler's log-probabilities of such an answer are not known. The algorithm puts those of the starting policy in their
place. With `fresh`, newly sampled answers join the recorded ones of their prompt, and all of them share one baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.shuffling import keyed_order
from posttrain.rollouts.fresh import FreshRollouts, TaskStream
from posttrain.types import Completion, Group, Rollout, Task


@dataclass
class RecordedRollouts:
    """Hands out at most `num_recorded` recorded answers of each prompt, and after them the fresh ones."""

    stream: TaskStream
    num_recorded: int
    seed: int
    fresh: FreshRollouts | None = None

    def sample(self, num_groups: int, step: int) -> tuple[list[Task], list[list[Completion]]]:
        tasks = list(self.stream.take(num_groups))
        recorded = [[rollout.completion for rollout in self.chosen(task)] for task in tasks]
        if self.fresh is None:
            return tasks, recorded
        return tasks, [old + new for old, new in zip(recorded, self.fresh.complete(tasks, step), strict=True)]

    def score(self, tasks: Sequence[Task], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Recorded answers keep the reward that they came with; fresh ones are judged."""
        recorded = [self.chosen(task) for task in tasks]
        if self.fresh is None:
            return [Group(task, rollouts) for task, rollouts in zip(tasks, recorded, strict=True)]
        new = [samples[len(old) :] for old, samples in zip(recorded, completions, strict=True)]
        judged = self.fresh.score(tasks, new)
        return [Group(task, old + group.rollouts) for task, old, group in zip(tasks, recorded, judged, strict=True)]

    def chosen(self, task: Task) -> tuple[Rollout, ...]:
        """The task's own record, or as many of it as are wanted: others at each visit, the same ones after a restart."""
        if len(task.recorded) <= self.num_recorded:
            return task.recorded
        picked = keyed_order(len(task.recorded), self.seed, task.draw)[: self.num_recorded]
        return tuple(task.recorded[index] for index in sorted(picked.tolist()))
