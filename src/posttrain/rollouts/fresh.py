"""Groups sampled on demand: prompts from the data stream, completions from an engine, scores from an
environment. A failed request or a completion that cannot be scored becomes an unscored rollout with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from posttrain.algorithms.batches import RowStream
from posttrain.algorithms.step_reports import StageClock
from posttrain.data.row_dataset import keyed_order
from posttrain.errors import InputError
from posttrain.roles import (
    Engine,
    Environment,
    KeepsPrefixes,
    Progress,
    RolloutSource,
    RoundEngine,
    ShowProgress,
    no_progress,
)
from posttrain.types import (
    Completion,
    Group,
    NoiseKey,
    OpenAnswer,
    OpenGroup,
    Quota,
    Rollout,
    Sampling,
    Score,
    TakenGroups,
    Task,
    Unfinished,
)

TaskStream = RowStream[Task]


@runtime_checkable
class DrawnTasks(RowStream[Task], Protocol):
    def item(self, position: int) -> Task:
        """The task with this `draw`, for groups of a checkpoint."""


@dataclass(frozen=True)
class FixedTasks:
    """The same tasks in every call, starting at the first. Used for validation."""

    tasks: Sequence[Task]

    def take(self, count: int) -> Sequence[Task]:
        return self.tasks[:count]


@dataclass(frozen=True)
class UnscoredRollout:
    """A sampled completion, and the answer that its environment still has to judge."""

    completion: Completion
    to_judge: Completion | None  # None: `score` is final, nothing to judge
    score: Score | None = None  # sum over the turns; the judge's score is added to it

    @classmethod
    def of(cls, completion: Completion) -> UnscoredRollout:
        """A single turn."""
        if completion.error is not None:
            return cls(completion, None, Score(None, error=completion.error))
        return cls(completion, completion)

    def with_verdict(self, verdict: Score) -> Score:
        turns = self.score
        if turns is None or turns.reward is None or verdict.reward is None:
            return verdict
        parts = {**turns.parts, **verdict.parts}
        if turns.reward:
            parts |= {"turns": turns.reward, "answer": verdict.reward}
        return replace(verdict, reward=turns.reward + verdict.reward, parts=parts)


@dataclass
class FreshRollouts:
    """A `RolloutSource` that samples with the current weights and scores immediately."""

    stream: TaskStream
    engine: Engine
    environment: Environment
    num_samples: int
    sampling: Sampling
    seed: int
    show_progress: ShowProgress = no_progress
    label: str = "generation"
    after_step: bool = False  # sample with the weights after step `step`, not before it
    when_whole: Callable[[OpenGroup], None] | None = None  # gets every group before it is scored, if not earlier
    metrics: dict[str, float] = field(default_factory=dict, init=False)  # of the last sampling

    def take(self, num_groups: int, step: int) -> TakenGroups:
        clock = StageClock()
        with clock("data_processing"):
            tasks = list(self.stream.take(num_groups))
        groups = tuple(self.roll_out(tasks, step, clock))
        return TakenGroups(groups, groups, clock.spans, self.metrics)

    def roll_out(self, tasks: Sequence[Task], step: int, clock: StageClock) -> list[Group]:
        """A scored group for each of these tasks."""
        with clock("generation"):
            unscored = self.sample(tasks, step)
        with clock("reward_calculation"):
            return self.score(tasks, unscored)

    def sample(self, tasks: Sequence[Task], step: int) -> list[list[UnscoredRollout]]:
        sampled = self._generate(self.label, tasks, self.num_samples, NoiseKey(self.seed, step))
        return [[UnscoredRollout.of(completion) for completion in completions] for completions in sampled]

    def _generate(self, label: str, tasks: Sequence[Task], num_samples: int, key: NoiseKey) -> list[list[Completion]]:
        versions = self.versions(key.step)
        with self.show_progress(label, len(tasks) * num_samples) as progress:
            sampled = self.engine.generate(tasks, num_samples, self.sampling, key, progress)
        return [[replace(completion, versions=versions) for completion in samples] for samples in sampled]

    @contextmanager
    def _kept_prefixes(self, engine: Engine) -> Iterator[None]:
        """What a turn has computed is reused in the next one. Nothing is left from one step to another, so a resumed
        run computes the same.
        """
        if not isinstance(engine, KeepsPrefixes):
            yield
            return
        engine.keep_prefixes(True)
        yield
        counts = engine.keep_prefixes(False)
        self.metrics = {}
        if counts is not None:
            self.metrics["prefill_tokens_computed"] = float(counts.computed)
            self.metrics["prefill_tokens_reused"] = float(counts.reused)

    def versions(self, step: int) -> tuple[tuple[int, int], ...]:
        """`Completion.versions` for one call: the weights do not change during a call."""
        return ((0, step if self.after_step else step - 1),)

    # -- in rounds -----------------------------------------------------------------------------------------------------

    def begin(self, tasks: Sequence[Task], step: int) -> list[OpenGroup]:
        return [OpenGroup(task, step, (Unfinished(),) * self.num_samples) for task in tasks]

    def advance(self, groups: Sequence[OpenGroup], quota: Quota, engine: RoundEngine, version: int) -> list[OpenGroup]:
        """Sample until `quota` is met. The engine holds the weights of `version`."""
        begun = max(
            (len(a.token_ids) for group in groups for a in group.answers if isinstance(a, Unfinished)), default=0
        )
        if begun >= self.sampling.max_new_tokens:
            raise InputError(
                f"policy.generation.max_new_tokens = {self.sampling.max_new_tokens}: the checkpoint has an unfinished "
                f"answer of {begun} tokens; set it to more than that"
            )
        total = quota.num_groups * self.num_samples
        with self.show_progress(self.label, total) as progress:
            after = engine.sample_round(groups, self.sampling, self.seed, quota, _up_to(total, progress))
        return [_with_version(old, new, version) for old, new in zip(groups, after, strict=True)]

    def unscored(self, group: OpenGroup) -> list[UnscoredRollout]:
        """The answers of a whole group."""
        return [UnscoredRollout.of(answer) for answer in group.answers if isinstance(answer, Completion)]

    # ------------------------------------------------------------------------------------------------------------------

    def score(self, tasks: Sequence[Task], unscored: Sequence[Sequence[UnscoredRollout]]) -> list[Group]:
        if self.when_whole is not None:
            for task, samples in zip(tasks, unscored, strict=True):
                self.when_whole(OpenGroup(task, 0, tuple(rollout.completion for rollout in samples)))
        flat = [(task, rollout) for task, samples in zip(tasks, unscored, strict=True) for rollout in samples]
        to_judge = [(task, rollout.to_judge) for task, rollout in flat if rollout.to_judge is not None]
        with self.show_progress("scoring", len(flat)) as progress:
            if len(to_judge) < len(flat):
                progress(len(flat) - len(to_judge))
            judged = self.environment.score([task for task, _ in to_judge], [c for _, c in to_judge], progress)
        verdicts = iter(judged)
        return [
            Group(task, tuple(_rollout(rollout, verdicts) for rollout in samples))
            for task, samples in zip(tasks, unscored, strict=True)
        ]


@dataclass
class RecordedRollouts:
    """A `RolloutSource` of answers that were sampled and scored elsewhere, at most `num_recorded` of each prompt. With
    `fresh`, newly sampled ones join them, and all share one baseline.

    The behaviour policy of a recorded answer is unknown: the algorithm takes the initial policy's log-probabilities.
    """

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


@dataclass(frozen=True)
class TaughtRollouts:
    """A `RolloutSource` for distillation alone: answers that could not be scored are trained on as well."""

    source: RolloutSource

    def take(self, num_groups: int, step: int) -> TakenGroups:
        taken = self.source.take(num_groups, step)
        groups = [
            replace(
                group, rollouts=tuple(replace(one, is_taught=bool(one.completion.token_ids)) for one in group.rollouts)
            )
            for group in taken.groups
        ]
        return replace(taken, groups=tuple(groups))


def _rollout(rollout: UnscoredRollout, verdicts: Iterator[Score]) -> Rollout:
    if rollout.to_judge is not None:
        return Rollout(rollout.completion, rollout.with_verdict(next(verdicts)))
    assert rollout.score is not None, "a rollout that is not judged has its score"
    return Rollout(rollout.completion, rollout.score)


def _with_version(old: OpenGroup, new: OpenGroup, version: int) -> OpenGroup:
    """Record `version` for the tokens that this round added."""

    def marked(before: OpenAnswer, after: OpenAnswer) -> OpenAnswer:
        if len(after.token_ids) == len(before.token_ids):
            return after
        assert isinstance(after, Completion | Unfinished)
        return replace(after, versions=(*before.versions, (len(before.token_ids), version)))

    return replace(new, answers=tuple(map(marked, old.answers, new.answers)))


def _up_to(total: int, progress: Progress) -> Progress:
    """Caps progress at the step's need: a round may also finish answers of groups that stay open."""
    num_shown = 0

    def shown(count: int) -> None:
        nonlocal num_shown
        count = min(count, total - num_shown)
        num_shown += count
        if count:
            progress(count)

    return shown
