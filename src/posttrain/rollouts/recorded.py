"""Groups of recorded answers, which were sampled and scored elsewhere.

The behaviour policy of such an answer is unknown. The algorithm uses the log-probabilities of the initial policy
instead. With `fresh`, newly sampled answers join the recorded ones of their prompt, and all of them share one baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.algorithms.step_reports import StageClock
from posttrain.data.row_dataset import keyed_order
from posttrain.rollouts.fresh import FreshRollouts, TaskStream
from posttrain.types import Group, Rollout, TakenGroups, Task


@dataclass
class RecordedRollouts:
    """A `RolloutSource`: at most `num_recorded` recorded answers of each prompt, then the fresh ones."""

    stream: TaskStream
    num_recorded: int
    seed: int
    fresh: FreshRollouts | None = None

    def take(self, num_groups: int, step: int) -> TakenGroups:
        """Recorded answers keep their recorded reward; fresh ones are scored."""
        clock = StageClock()
        with clock("data_processing"):
            tasks = list(self.stream.take(num_groups))
            groups = [Group(task, self.chosen(task)) for task in tasks]
        if self.fresh is not None:
            fresh = self.fresh.roll_out(tasks, step, clock)
            groups = [Group(old.task, old.rollouts + new.rollouts) for old, new in zip(groups, fresh, strict=True)]
        else:
            clock.add({"generation": 0.0, "reward_calculation": 0.0})  # every step reports these stages
        return TakenGroups(tuple(groups), tuple(groups), clock.spans)

    def chosen(self, task: Task) -> tuple[Rollout, ...]:
        """All recorded answers of the task, or `num_recorded` of them: a different subset in each epoch, the same
        subset after a restart.
        """
        if len(task.recorded) <= self.num_recorded:
            return task.recorded
        picked = keyed_order(len(task.recorded), self.seed, task.draw)[: self.num_recorded]
        return tuple(task.recorded[index] for index in sorted(picked.tolist()))
