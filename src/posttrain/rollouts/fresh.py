"""Where groups come from: prompts from the data stream, completions from a generator, scores from an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.roles import Engine, Environment, ShowProgress, no_progress
from posttrain.types import Completion, Group, NoiseKey, Rollout, Sampling, Task


class TaskStream(Protocol):
    def take(self, count: int) -> Sequence[Task]: ...


@dataclass
class FreshRollouts:
    """Samples and scores when asked, from the policy as it is now."""

    stream: TaskStream
    generator: Engine
    environment: Environment
    num_samples: int
    sampling: Sampling
    seed: int
    show_progress: ShowProgress = no_progress
    label: str = "generation"

    def sample(self, num_groups: int, step: int) -> tuple[list[Task], list[list[Completion]]]:
        tasks = list(self.stream.take(num_groups))
        return tasks, self.complete(tasks, step)

    def complete(self, tasks: Sequence[Task], step: int) -> list[list[Completion]]:
        with self.show_progress(self.label, len(tasks) * self.num_samples) as progress:
            return self.generator.generate(tasks, self.num_samples, self.sampling, NoiseKey(self.seed, step), progress)

    def score(self, tasks: Sequence[Task], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        flat_tasks = [task for task, samples in zip(tasks, completions, strict=True) for _ in samples]
        flat = [completion for samples in completions for completion in samples]
        with self.show_progress("scoring", len(flat)) as progress:
            scores = iter(self.environment.score(flat_tasks, flat, progress))
        return [
            Group(task, tuple(Rollout(completion, next(scores)) for completion in samples))
            for task, samples in zip(tasks, completions, strict=True)
        ]
