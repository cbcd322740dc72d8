"""Scripted implementations of the roles, for unit tests. They write what happens to a list of events that a test reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.roles import Objective, Progress
from posttrain.types import StepReport, TokenBatch, UpdateReport

Events = list[tuple[Any, ...]]


@dataclass
class FakeAlgorithm:
    """Reports a reward of a tenth of the step, and a random loss from Python's generator, whose state a checkpoint holds."""

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
    resumed_step: int = -1

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

    def record_validation(self, step: int, validation: StepReport) -> None:
        self.events.append(("record", step))

    def finish(self, reason: str) -> None:
        self.reason = reason


@dataclass
class FakeSaver:
    """Saves nothing and resumes after `step`."""

    events: Events
    step: int = 0
    is_enabled: bool = True
    abandoned: list[Exception] = field(default_factory=list)

    def resume(self) -> int:
        return self.step

    def with_timings(self, report: StepReport) -> StepReport:
        return report

    def note_validation(self) -> None: ...

    def after_step(self, step: int, report: StepReport, validation: StepReport | None, *, is_last: bool) -> None:
        self.events.append(("after_step", step, is_last))

    def abandon(self, error: Exception) -> None:
        self.abandoned.append(error)
