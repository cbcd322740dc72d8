"""Scripted implementations of the roles, for unit tests: they do what the test says and write down what was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.roles import Objective, Progress
from posttrain.types import (
    Completion,
    Group,
    NoiseKey,
    Rollout,
    Sampling,
    Score,
    TakenGroups,
    Task,
    TokenBatch,
    UpdateReport,
)

Answer = Callable[[Task, int, NoiseKey], Completion]  # (task, sample, key) -> completion
Verdict = Callable[[Task, Completion], Score]


def completion(text: str, *, num_tokens: int = 1) -> Completion:
    return Completion((7,) * num_tokens, (-0.5,) * num_tokens, text, "stop")


class ScriptedTasks:
    """A stream of tasks with a position, as a checkpoint sees it."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.position = list(tasks), 0

    def take(self, count: int) -> list[Task]:
        self.position += count
        return self.tasks[self.position - count : self.position]

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.position = int(str(state["position"]))


class ScriptedEngine:
    """A `roles.Generator` whose completions `answer` writes. `calls` holds the draws of each call."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[list[int]] = []

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        self.calls.append([task.draw for task in tasks])
        if progress is not None:
            progress(len(tasks) * num_samples)
        return [[self.answer(task, task.first_sample + i, key) for i in range(num_samples)] for task in tasks]


class ScriptedEnvironment:
    """A `roles.Environment` that scores with `verdict`. `seen` holds the texts that were judged."""

    def __init__(self, verdict: Verdict = lambda task, completion: Score(1.0)) -> None:
        self.verdict = verdict
        self.seen: list[str] = []

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        self.seen += [completion.text for completion in completions]
        if progress is not None and completions:
            progress(len(completions))
        return [self.verdict(task, answer) for task, answer in zip(tasks, completions, strict=True)]

    def close(self) -> None: ...


class ScriptedRollouts:
    """A `roles.RolloutSource` that hands out the given groups one after the other, sampled by the weights of the step.

    Also the stream whose position is part of a checkpoint. `asked` holds the number of groups of each call.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.position = 0
        self.asked: list[int] = []

    def take(self, num_groups: int, step: int) -> TakenGroups:
        self.asked.append(num_groups)
        chosen = self.groups[self.position : self.position + num_groups]
        self.position += num_groups
        groups = tuple(replace(group, rollouts=tuple(_sampled(r, step) for r in group.rollouts)) for group in chosen)
        return TakenGroups(groups, groups, {"generation": 1.0, "reward_calculation": 0.5})

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.position = int(str(state["position"]))


def _sampled(rollout: Rollout, step: int) -> Rollout:
    answer = rollout.completion
    return replace(rollout, completion=replace(answer, versions=((0, step - 1),))) if answer.logprobs else rollout


class ScriptedPolicy:
    """A policy with constant log-probabilities. `calls` and `batches` hold what it was asked to do."""

    def __init__(self, logprob: float = -1.0, reference_logprob: float = -2.0) -> None:
        self.logprob, self.reference_logprob = logprob, reference_logprob
        self.calls: list[str] = []
        self.batches: list[TokenBatch] = []

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.calls.append("update")
        self.batches.append(batch)
        number = float(len(self.batches))
        return UpdateReport({"loss": number, "probs_ratio_min": number, "probs_ratio_max": number})

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.calls.append("logprobs")
        return torch.full((sum(batch.response_lengths),), self.logprob)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        self.calls.append("reference_logprobs")
        return torch.full((sum(batch.response_lengths),), self.reference_logprob)

    def end_step(self) -> None:
        self.calls.append("end_step")
