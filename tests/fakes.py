"""Scripted implementations of the roles, for unit tests: they do what the test says and write down what was asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ExitCode
from posttrain.roles import Finished, Objective, Progress
from posttrain.types import (
    Completion,
    Group,
    NoiseKey,
    Rollout,
    Sampling,
    Score,
    StepReport,
    TakenGroups,
    Task,
    TokenBatch,
    UpdateReport,
)

Events = list[tuple[Any, ...]]
Answer = Callable[[Task, int, NoiseKey], Completion]  # (task, sample, key) -> completion
Verdict = Callable[[Task, Completion], Score]


def completion(text: str, *, num_tokens: int = 1) -> Completion:
    return Completion((7,) * num_tokens, (-0.5,) * num_tokens, text, "stop")


class ScriptedTasks:
    """A stream of tasks with a position, as stored in a checkpoint."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.position = list(tasks), 0

    def take(self, count: int) -> list[Task]:
        self.position += count
        return self.tasks[self.position - count : self.position]

    def item(self, position: int) -> Task:
        return self.tasks[position]

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.position = int(str(state["position"]))


class ScriptedEngine:
    """A `roles.Engine` whose completions `answer` writes. `calls` holds the draws of each call."""

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

    def release(self) -> None: ...


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


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass
class FakeAlgorithm:
    """Reports a tenth of the step as reward, and a loss from Python's generator, whose state a checkpoint holds."""

    events: Events
    validates: bool = True
    during_step: Callable[[int], None] = lambda step: None

    def step(self, step: int) -> StepReport:
        self.events.append(("step", step))
        self.during_step(step)
        return StepReport({"reward": step / 10, "loss": random.random()}, {"generation": 1.0}, num_tokens=10)

    def validate(self, step: int) -> StepReport | None:
        if not self.validates:
            return None
        self.events.append(("validate", step))
        return StepReport({"accuracy": step / 10, "loss": 1 - step / 10}, {})


@dataclass
class FakeTrainer:
    """A trainer without a model: log-probabilities are constants, saving writes one small file."""

    events: Events = field(default_factory=list)
    num_updates: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: {"loss": 0.0})
    obstacle: str = ""
    writing: Callable[[str], None] = lambda name: None  # called in the thread that writes
    batches: list[TokenBatch] = field(default_factory=list)

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.batches.append(batch)
        self.num_updates += 1
        return UpdateReport(dict(self.metrics))

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        return UpdateReport(dict(self.metrics))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.events.append(("logprobs",))
        return torch.full((sum(batch.response_lengths),), -7.0)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        self.events.append(("reference_logprobs",))
        return torch.full((sum(batch.response_lengths),), -9.0)

    def reference_fingerprint(self) -> str:
        return "ab" * 32

    def end_step(self) -> None: ...

    def save(self, folder: Path, *, optimizer: bool) -> None:
        self.events.append(("save", folder.name.removeprefix("tmp_"), optimizer))
        (folder / "weights").write_text("weights")

    def load(self, folder: Path) -> None:
        self.events.append(("load", folder.name))

    def save_obstacle(self, *, optimizer: bool) -> str:
        return self.obstacle

    def prepare_save(self, *, optimizer: bool) -> bool:
        self.events.append(("prepare", optimizer))
        return True

    def begin_save(self, folder: Path, *, optimizer: bool) -> Callable[[Callable[[], bool]], None]:
        name = folder.name.removeprefix("tmp_")
        self.events.append(("begin", name, optimizer))

        def write(is_given_up: Callable[[], bool]) -> None:
            self.writing(name)
            (folder / "weights").write_text("weights")
            self.events.append(("written", name))

        return write

    def take_save_wait_s(self) -> float:
        return 100.0


@dataclass
class FakeWeightSync:
    published: list[int] = field(default_factory=list)

    def publish(self, version: int) -> None:
        self.published.append(version)


@dataclass
class FakeStream:
    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class FakeRecorder:
    events: Events
    rows: dict[int, tuple[StepReport, StepReport | None]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    reason: str = ""
    exit_code: ExitCode = ExitCode.DONE
    resumed_step: int = -1
    problem: str | None = None  # for which the run has to stop

    def reason_to_stop(self) -> str | None:
        return self.problem

    def start(self, resumed_step: int) -> None:
        self.resumed_step = resumed_step

    def begin_step(self, step: int) -> None: ...

    def stage(self, text: str) -> None: ...

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Progress]:
        yield lambda _: None

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def record_step(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        self.events.append(("record", step))
        self.rows[step] = (report, validation)

    def record_save(self, step: int, seconds: float, tokenizer: str) -> None: ...

    def record_validation(self, step: int, validation: StepReport) -> None:
        self.events.append(("record", step))

    def finish(self, reason: str, *, is_stopped: bool = False) -> ExitCode:
        self.reason = reason
        return self.exit_code


@dataclass
class FakeSaver:
    """Keeps the number of the last saved step alone, in a file of `folder`; saves every second step."""

    folder: Path
    is_enabled: bool = True
    owes_validation: bool = False
    events: Events = field(default_factory=list)
    abandoned: list[Exception] = field(default_factory=list)

    def resume(self) -> int:
        file = self.folder / "step"
        return int(file.read_text()) if file.exists() else 0

    def with_timings(self, report: StepReport) -> StepReport:
        return report

    def note_validation(self) -> None:
        self.events.append(("validated",))

    def begin_step(self) -> None: ...

    def after_step(
        self, step: int, report: StepReport, validation: StepReport | None, *, is_last: bool, is_wanted: bool = False
    ) -> None:
        self.events.append(("after_step", step, is_last))
        if is_last or is_wanted or step % 2 == 0:
            (self.folder / "step").write_text(str(step))

    def save_and_stop(
        self, step: int, finished: Finished | None, *, owes_validation: bool, seconds_left: float | None
    ) -> str:
        (self.folder / "step").write_text(str(step))
        return ""

    def abandon(self, error: Exception) -> None:
        self.abandoned.append(error)
