"""Asynchronous sampling in rounds: unfinished answers continue in the next round once a step has enough groups.

A round samples under one version of the weights. It ends when enough groups for one step are complete; unfinished
answers keep their tokens, their noise key and the versions that sampled them, and continue in the next round, with keys
and values recomputed by its weights. A conversation is carried over between two of its turns. Rounds are measured in
groups, not in seconds, so which version samples a token follows from seed and config, and a resumed run repeats it bit
for bit.

No group is discarded, and none becomes older than `max_age` steps: a round that would make one older waits for it.
Groups are trained oldest first. Towards the end of the run no more groups are begun than its steps can train, so that
every draw is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.algorithms.step_reports import StageClock
from posttrain.roles import RoundEngine, Stateful
from posttrain.rollouts.dynamic_sampling import from_plain, to_plain
from posttrain.rollouts.fresh import DrawnTasks, FreshRollouts
from posttrain.rollouts.multi_turn import Dialogue
from posttrain.types import Completion, OpenAnswer, OpenGroup, Quota, TakenGroups, Unfinished

ROUNDS, ROUND_METRICS = "rounds", "round_metrics"  # keys in the checkpoint's state


@dataclass
class StreamAndOpenGroups:
    """The data position, the groups being sampled, in draw order, and what the last round counted."""

    stream: Stateful
    tasks: DrawnTasks | None = None  # set by `RoundRollouts`
    open: list[OpenGroup] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)  # a round that was sampled ahead is in a checkpoint

    def state_dict(self) -> dict[str, object]:
        rows = [
            {"draw": group.task.draw, "born": group.born, "answers": [to_plain(answer) for answer in group.answers]}
            for group in self.open
        ]
        return {**self.stream.state_dict(), ROUNDS: rows, ROUND_METRICS: dict(self.metrics)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.stream.load_state_dict(state)
        rows = state.get(ROUNDS, [])  # a run that began without rounds has no open group
        assert isinstance(rows, list)
        assert self.tasks is not None, "the rollouts are built before a checkpoint is loaded"
        counts = state.get(ROUND_METRICS, {})
        assert isinstance(counts, Mapping)
        self.metrics = dict(counts)
        self.open = []
        for row in rows:
            task = self.tasks.item(row["draw"])
            answers: list[OpenAnswer] = []
            for answer in map(from_plain, row["answers"]):
                assert isinstance(answer, Completion | Unfinished | Dialogue)
                answers.append(replace(answer, task=task) if isinstance(answer, Dialogue) else answer)
            self.open.append(OpenGroup(task, row["born"], tuple(answers)))


@dataclass
class RoundRollouts:
    """A `RolloutSource` over the stream, engine and environment of `fresh`."""

    fresh: FreshRollouts
    engine: RoundEngine
    position: StreamAndOpenGroups
    max_age: int  # maximum steps between the start of a group and training on it
    num_in_flight: int  # groups sampled at once; at most what (max_age + 1) steps can train on
    max_steps: int  # steps of the run

    def __post_init__(self) -> None:
        assert isinstance(self.fresh.stream, DrawnTasks), "rounds are over a stream of training data"
        self.position.tasks = self.fresh.stream

    def take(self, num_groups: int, step: int) -> TakenGroups:
        clock = StageClock()
        num_tokens = self.sample(num_groups, step, version=step - 1, clock=clock)
        taken = self.hand_out(num_groups, step, clock)
        return replace(taken, metrics={**taken.metrics, "num_generated_tokens": float(num_tokens)})

    def sample(self, num_groups: int, step: int, version: int, clock: StageClock) -> int:
        """Run the round for `step`. The engine holds the weights of `version`. Returns the number of sampled tokens."""
        with clock("data_processing"):
            tasks = self.fresh.stream.take(self._num_missing(num_groups, step))
        with clock("generation"):
            before = [*self.position.open, *self.fresh.begin(tasks, version + 1)]
            num_before = _num_sampled(before)
            self.position.open = self.fresh.advance(before, self._quota(num_groups, step), self.engine, version)
        self.position.metrics = dict(self.fresh.metrics)
        return _num_sampled(self.position.open) - num_before

    def hand_out(self, num_groups: int, step: int, clock: StageClock) -> TakenGroups:
        """Complete groups, scored, oldest first."""
        fresh = self.fresh
        whole = [place for place, group in enumerate(self.position.open) if group.is_whole][:num_groups]
        chosen = [self.position.open[place] for place in whole]
        self.position.open = [group for place, group in enumerate(self.position.open) if place not in set(whole)]
        with clock("reward_calculation"):
            groups = tuple(fresh.score([group.task for group in chosen], [fresh.unscored(group) for group in chosen]))
        return TakenGroups(groups, groups, clock.spans, {**self._metrics(step, chosen), **self.position.metrics})

    def is_sampled(self, num_groups: int, step: int) -> bool:
        """Whether the round of `step` has ended: the open groups meet its quota."""
        groups, quota = self.position.open, self._quota(num_groups, step)
        is_met = quota.is_met([group.born for group in groups], [group.is_whole for group in groups])
        return self._num_missing(num_groups, step) == 0 and is_met

    def _quota(self, num_groups: int, step: int) -> Quota:
        return Quota(num_groups, step, self.max_age)

    def _num_missing(self, num_groups: int, step: int) -> int:
        """Number of groups to start in the round of `step`: at most what the remaining steps can train on."""
        wanted = min(self.num_in_flight, (self.max_steps - step + 1) * num_groups)
        return max(wanted - len(self.position.open), 0)

    def _metrics(self, step: int, chosen: Sequence[OpenGroup]) -> dict[str, float]:
        ages = [step - group.born for group in chosen]
        tokens = [
            (step - 1 - version, count)
            for group in chosen
            for answer in group.answers
            for version, count in _tokens_by_version(answer)
        ]
        num_tokens = sum(count for _, count in tokens)
        return {
            "trajectory_age_mean": sum(ages) / len(ages),
            "trajectory_age_max": float(max(ages)),
            "stale_token_fraction": sum(count for age, count in tokens if age > 0) / max(num_tokens, 1),
            "num_open_groups": float(len(self.position.open)),
            "num_carried_tokens": float(_num_sampled(self.position.open)),
        }


def _tokens_by_version(answer: OpenAnswer) -> Iterator[tuple[int, int]]:
    ends = [*(first for first, _ in answer.versions), len(answer.token_ids)][1:]  # none: it has no tokens
    for (first, version), end in zip(answer.versions, ends, strict=True):
        yield version, end - first


def _num_sampled(groups: Sequence[OpenGroup]) -> int:
    return sum(answer.num_sampled for group in groups for answer in group.answers)
