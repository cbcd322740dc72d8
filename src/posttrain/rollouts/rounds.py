"""Asynchronous sampling in rounds: answers that are not finished when a step has enough groups continue in the next one.

A round samples under one version of the weights. It ends when as many groups are whole as a step trains on; unfinished
answers keep their tokens, their noise key and the versions that sampled them, and continue in the next round, with keys and
values recomputed by its weights. Rounds are measured in groups, not in seconds, so which version samples a token follows
from seed and config, and a resumed run repeats it bit for bit.

No group is discarded, and none becomes older than `max_age` steps: a round that would make one older waits for it. Groups
are trained oldest first. Towards the end of the run no more groups are begun than its steps can train, so that every draw
is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from posttrain.algorithms.step_reports import StageClock
from posttrain.roles import Progress, RoundEngine, Stateful
from posttrain.rollouts.fresh import FreshRollouts, UnscoredRollout
from posttrain.rollouts.surplus import from_plain, to_plain
from posttrain.types import Completion, OpenGroup, Quota, TakenGroups, Task, Unfinished

ROUNDS = "rounds"  # key in the checkpoint's state


class DrawnTasks(Stateful, Protocol):
    def item(self, position: int) -> Task:
        """The task with this `draw`."""
        ...


@dataclass
class StreamAndOpenGroups:
    """The position in the data and the groups that are being sampled, in the order of their draws."""

    stream: DrawnTasks
    open: list[OpenGroup] = field(default_factory=list)

    def state_dict(self) -> dict[str, object]:
        rows = [
            {"draw": group.task.draw, "born": group.born, "answers": [to_plain(answer) for answer in group.answers]}
            for group in self.open
        ]
        return {**self.stream.state_dict(), ROUNDS: rows}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.stream.load_state_dict(state)
        rows = state.get(ROUNDS, [])  # a run that began without rounds has no open group
        assert isinstance(rows, list)
        self.open = [
            OpenGroup(self.stream.item(row["draw"]), row["born"], tuple(map(_answer, row["answers"]))) for row in rows
        ]


def _answer(row: object) -> Completion | Unfinished:
    answer = from_plain(row)
    assert isinstance(answer, Completion | Unfinished)
    return answer


@dataclass
class RoundRollouts:
    """A `RolloutSource` over the stream, engine and environment of `fresh`."""

    fresh: FreshRollouts
    engine: RoundEngine
    position: StreamAndOpenGroups
    max_age: int  # steps between the one that begins a group and the one that trains on it
    num_in_flight: int  # groups that are sampled at once; (max_age + 1) steps can train them
    max_steps: int  # of the run

    def take(self, num_groups: int, step: int) -> TakenGroups:
        fresh, clock = self.fresh, StageClock()
        with clock("data_processing"):
            before = [*self.position.open, *self._begun(num_groups, step)]
        with clock("generation"):
            after = self._sampled(before, Quota(num_groups, step, self.max_age))
            whole = [place for place, group in enumerate(after) if group.is_whole][:num_groups]
            chosen = [after[place] for place in whole]
            self.position.open = [group for place, group in enumerate(after) if place not in set(whole)]
        with clock("reward_calculation"):
            groups = tuple(fresh.score([group.task for group in chosen], [list(_unscored(group)) for group in chosen]))
        return TakenGroups(groups, groups, clock.spans, self._metrics(step, before, after, chosen))

    def _begun(self, num_groups: int, step: int) -> list[OpenGroup]:
        """New groups, but no more than the rest of the run trains on."""
        wanted = min(self.num_in_flight, (self.max_steps - step + 1) * num_groups)
        tasks = self.fresh.stream.take(max(wanted - len(self.position.open), 0))
        return [OpenGroup(task, step, (Unfinished(),) * self.fresh.num_samples) for task in tasks]

    def _sampled(self, groups: Sequence[OpenGroup], quota: Quota) -> list[OpenGroup]:
        fresh, total = self.fresh, quota.num_groups * self.fresh.num_samples
        with fresh.show_progress(fresh.label, total) as progress:
            sampled = self.engine.sample_round(groups, fresh.sampling, fresh.seed, quota, _up_to(total, progress))
        version = quota.step - 1
        return [_with_version(old, new, version) for old, new in zip(groups, sampled, strict=True)]

    def _metrics(
        self, step: int, before: Sequence[OpenGroup], after: Sequence[OpenGroup], chosen: Sequence[OpenGroup]
    ) -> dict[str, float]:
        ages = [step - group.born for group in chosen]
        tokens = [
            (step - 1 - version, count)
            for group in chosen
            for answer in group.answers
            for version, count in _tokens_by_version(answer)
        ]
        num_tokens = sum(count for _, count in tokens)
        return {
            "num_generated_tokens": float(_num_tokens(after) - _num_tokens(before)),
            "trajectory_age_mean": sum(ages) / len(ages),
            "trajectory_age_max": float(max(ages)),
            "stale_token_fraction": sum(count for age, count in tokens if age > 0) / max(num_tokens, 1),
            "num_open_groups": float(len(self.position.open)),
            "num_carried_tokens": float(_num_tokens(self.position.open)),
        }


def _with_version(old: OpenGroup, new: OpenGroup, version: int) -> OpenGroup:
    """Tokens that the round has added were sampled by `version`."""
    return replace(
        new,
        answers=tuple(
            replace(after, versions=(*before.versions, (len(before.token_ids), version)))
            if len(after.token_ids) > len(before.token_ids)
            else after
            for before, after in zip(old.answers, new.answers, strict=True)
        ),
    )


def _tokens_by_version(answer: Completion | Unfinished) -> Iterator[tuple[int, int]]:
    ends = [first for first, _ in answer.versions[1:]] + [len(answer.token_ids)]
    for (first, version), end in zip(answer.versions, ends, strict=True):
        yield version, end - first


def _unscored(group: OpenGroup) -> Iterator[UnscoredRollout]:
    for answer in group.answers:
        assert isinstance(answer, Completion), "the group is whole"
        yield UnscoredRollout.of(answer)


def _num_tokens(groups: Sequence[OpenGroup]) -> int:
    return sum(len(answer.token_ids) for group in groups for answer in group.answers)


def _up_to(total: int, progress: Progress) -> Progress:
    """A round may finish answers of groups that stay open; the bar shows no more than the step needs."""
    num_shown = 0

    def shown(count: int) -> None:
        nonlocal num_shown
        count = min(count, total - num_shown)
        num_shown += count
        if count:
            progress(count)

    return shown
