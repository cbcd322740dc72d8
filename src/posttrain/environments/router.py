"""The environments of a config: a task goes to the one that it names; its rewards are one, or a weighted sum.

Each reward has its own pool, number of workers and time limit, and rewards score in parallel. If one of them cannot
score a completion, that completion is unscored with the name of that reward; the values of the others are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from posttrain.data.reward_values import NEEDED, is_reward, total
from posttrain.environments.item import ScoringItem
from posttrain.environments.pool import ScoringPool, scored_by_name
from posttrain.environments.reward_types import IN_PROCESS
from posttrain.environments.settings import EnvironmentSettings, RewardSettings, read_settings
from posttrain.errors import InputError
from posttrain.roles import Environment, Progress
from posttrain.types import Completion, Score, Task

Placed = Callable[[str], Environment | None]  # by the path of a reward: its environment, if it runs elsewhere


def build_environments(
    mapping: Any, base_folder: Path | None = None, placed: Placed = lambda path: None
) -> ScoringRouter:
    """The environments of a config's `env:`. Functions given as files are found relative to `base_folder`.

    No process is started before there is something to score.
    """
    settings = read_settings(mapping, base_folder)
    return ScoringRouter({name: build_environment(environment, placed) for name, environment in settings.items()})


class _Several:
    """Environments that are used together."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self.environments = dict(environments)

    def interrupt(self) -> None:
        """Callable from any thread: a running `score` ends with StopRequested within half a second. An environment
        without worker processes finishes it."""
        for environment in self.environments.values():
            if isinstance(environment, Interruptible):
                environment.interrupt()

    def close(self) -> None:
        for environment in self.environments.values():
            environment.close()


class ScoringRouter(_Several):
    """Implements `roles.Environment` over any number of named environments."""

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        """One score per completion, in their order. `tasks[i]` is what `completions[i]` answers."""
        assert len(tasks) == len(completions), "one task for each completion"
        return scored_by_name(
            [self._environment_of(task) for task in tasks],
            lambda name, rows: self.environments[name].score(
                [tasks[row] for row in rows], [completions[row] for row in rows], progress
            ),
        )

    def begin(self, task: Task, completions: Sequence[Completion]) -> None:
        """From any thread: begin to score a whole group, where a model on other devices does."""
        begin(self.environments[self._environment_of(task)], task, completions)

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


@runtime_checkable
class BeginsEarly(Protocol):
    def begin(self, task: Task, completions: Sequence[Completion]) -> None:
        """Begin to score; `score` finds the result."""


@runtime_checkable
class Interruptible(Protocol):
    def interrupt(self) -> None:
        """From any thread: a running `score` ends with StopRequested."""


def begin(environment: Environment, task: Task, completions: Sequence[Completion]) -> None:
    if isinstance(environment, BeginsEarly):
        environment.begin(task, completions)


def build_environment(settings: EnvironmentSettings, placed: Placed = lambda path: None) -> Environment:
    """The environment for these settings. No process is started before there is something to score."""

    def built_one(reward: RewardSettings) -> Environment:
        if (elsewhere := placed(reward.path)) is not None:
            return elsewhere
        if reward.config.type not in IN_PROCESS:
            return PooledReward(ScoringPool(reward))
        environment: Environment = resolve_name(IN_PROCESS[reward.config.type])(reward)
        return environment

    built = {name: built_one(reward) for name, reward in settings.rewards.items()}
    if settings.is_single:
        return built[""]
    weights = {name: float(reward.config.weight) for name, reward in settings.rewards.items()}
    return WeightedRewards(built, weights)


@dataclass(frozen=True)
class PooledReward:
    """A reward whose scorer runs in worker processes."""

    pool: ScoringPool

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        items = [scoring_item(task, completion) for task, completion in zip(tasks, completions, strict=True)]
        return self.pool.score(items, progress)

    def interrupt(self) -> None:
        self.pool.interrupt()

    def close(self) -> None:
        self.pool.close()


def scoring_item(task: Task, completion: Completion) -> ScoringItem:
    own = tuple(token for token, mine in zip(completion.token_ids, completion.trained, strict=True) if mine)
    return ScoringItem(
        prompt=task.prompt,
        response=completion.text,
        reference=task.reference,
        messages=[dict(message) for message in task.messages],
        metadata=dict(task.metadata),
        noise_key=f"{task.draw}\0{completion.text}",
        token_ids=own if own or not completion.text else None,  # stored text has no tokens
        finish_reason=completion.finish_reason,
    )


class WeightedRewards(_Several):
    """Implements `roles.Environment` by the weighted sum of several rewards."""

    def __init__(self, rewards: Mapping[str, Environment], weights: Mapping[str, float]) -> None:
        assert set(rewards) == set(weights), "each reward has a weight"
        super().__init__(rewards)
        self.weights = dict(weights)

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        advance = _progress_of_the_slowest(len(self.environments), progress)
        found: dict[str, list[Score]] = {}
        waiting: dict[str, Future[list[Score]]] = {}
        pooled = {name: reward for name, reward in self.environments.items() if isinstance(reward, PooledReward)}
        with ThreadPoolExecutor(max(1, len(pooled)), "scoring") as threads:
            try:
                for place, (name, reward) in enumerate(self.environments.items()):
                    if name in pooled:
                        waiting[name] = threads.submit(reward.score, tasks, completions, advance(place))
                for place, (name, reward) in enumerate(self.environments.items()):
                    if name not in pooled:  # models stay in their thread
                        found[name] = reward.score(tasks, completions, advance(place))
                found |= {name: future.result() for name, future in waiting.items()}
            except BaseException:
                for reward in pooled.values():
                    reward.interrupt()
                raise
        return [self._add_up({name: found[name][row] for name in self.environments}) for row in range(len(tasks))]

    def begin(self, task: Task, completions: Sequence[Completion]) -> None:
        for reward in self.environments.values():
            begin(reward, task, completions)

    def _add_up(self, scores: Mapping[str, Score]) -> Score:
        parts: dict[str, float] = {}
        for name, score in scores.items():
            if score.reward is not None:
                parts[name] = score.reward
            parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
        failed = {name: score for name, score in scores.items() if not score.scored}
        if failed:
            error = "; ".join(f"{name}: {score.error or 'no reason given'}" for name, score in failed.items())
            traces = [f"{name}:\n{score.traceback}" for name, score in failed.items() if score.traceback]
            return Score(None, parts, error, "\n".join(traces) or None)
        reward = total(self.weights[name] * parts[name] for name in scores)
        if not is_reward(reward):
            return Score(None, parts, f"the weighted rewards add up to {reward}: {NEEDED}")
        return Score(reward, parts)


def _progress_of_the_slowest(num_rewards: int, progress: Progress | None) -> Callable[[int], Progress | None]:
    """A progress for each reward. A completion counts as finished when every reward has finished that many."""
    finished = [0] * num_rewards
    reported = 0
    lock = threading.Lock()

    def advance(place: int) -> Progress | None:
        if progress is None:
            return None

        def note(count: int) -> None:
            nonlocal reported
            with lock:
                finished[place] += count
                news = min(finished) - reported
                reported += news
                if news:
                    progress(news)

        return note

    return advance
