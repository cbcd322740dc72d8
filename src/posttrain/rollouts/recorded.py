"""Groups from a record: answers that were given and judged elsewhere, handed out again as if they had just been sampled.

The sampler's log-probabilities of such an answer are not known. The algorithm puts those of the starting policy in their
place. With `fresh`, newly sampled answers join the recorded ones of their prompt, and all of them share one baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.algorithms.clock import StageClock
from posttrain.data.shuffling import keyed_order
from posttrain.rollouts.fresh import FreshRollouts, TaskStream
from posttrain.types import Group, Rollout, TakenGroups, Task


@dataclass
class RecordedRollouts:
    """Hands out at most `num_recorded` recorded answers of each prompt, and after them the fresh ones."""

    stream: TaskStream
    num_recorded: int
    seed: int
    fresh: FreshRollouts | None = None

    def take(self, num_groups: int, step: int) -> TakenGroups:
        """Recorded answers keep the reward that they came with; fresh ones are judged."""
        clock = StageClock()
        with clock("generation"):
            tasks = list(self.stream.take(num_groups))
            groups = [Group(task, self.chosen(task)) for task in tasks]
        if self.fresh is not None:
            fresh = self.fresh.roll_out(tasks, step, clock)
            groups = [Group(old.task, old.rollouts + new.rollouts) for old, new in zip(groups, fresh, strict=True)]
        else:
            with clock("reward_calculation"):  # the stage is reported, though nothing is left to do in it
                pass
        return TakenGroups(tuple(groups), tuple(groups), clock.spans)

    def chosen(self, task: Task) -> tuple[Rollout, ...]:
        """The task's own record, or as many of it as are wanted: others at each visit, the same ones after a restart."""
        if len(task.recorded) <= self.num_recorded:
            return task.recorded
        picked = keyed_order(len(task.recorded), self.seed, task.draw)[: self.num_recorded]
        return tuple(task.recorded[index] for index in sorted(picked.tolist()))
