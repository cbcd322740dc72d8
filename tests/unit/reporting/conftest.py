"""A recorder that writes to a string and reads a clock that the test moves, and reports to feed it with."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipes.grpo import GrpoRecipe
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.recorder import RunRecorder
from posttrain.reporting.rows import Hardware
from posttrain.types import Completion, Group, Rollout, Score, StepReport, Task


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Bench:
    """One run folder, and the recorders that work on it one after another."""

    folder: Path
    clock: FakeClock = field(default_factory=FakeClock)
    stream: io.StringIO = field(default_factory=io.StringIO)

    def make(self, **changes: Any) -> RunRecorder:
        """A recorder that has not started. `changes` are of its settings or of its other arguments."""
        settings: dict[str, Any] = {
            "presentation": GrpoRecipe.presentation,
            "max_steps": 10,
            "hardware": Hardware(2),
            "config_yaml": "grpo:\n  max_num_steps: 10\n",
        }
        names = {field.name for field in fields(RecorderSettings)}
        settings |= {name: value for name, value in changes.items() if name in names}
        others = {name: value for name, value in changes.items() if name not in names}
        return RunRecorder(
            self.folder, RecorderSettings(**settings), **({"stream": self.stream, "clock": self.clock} | others)
        )

    def recorder(self, resumed_step: int = 0, **changes: Any) -> RunRecorder:
        recorder = self.make(**changes)
        recorder.start(resumed_step)
        return recorder

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def output(self) -> str:
        return self.stream.getvalue()

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "train.log").read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


@pytest.fixture
def on_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    return Bench(tmp_path / "run_on_terminal", stream=Terminal())


def make_group(
    draw: int = 0,
    texts: tuple[str, ...] = ("4", "5"),
    scores: tuple[Score, ...] | None = None,
    advantages: tuple[float, ...] | None = None,
) -> Group:
    scores = scores or tuple(Score(float(index == 0), {"correct": float(index == 0)}) for index in range(len(texts)))
    task = Task(draw, f"sums:{draw}", "2 + 2 = ", (1, 2, 3), reference="4")
    completions = [Completion(tuple(range(len(text) + 1)), (0.0,) * (len(text) + 1), text, "stop") for text in texts]
    rollouts = zip(completions, scores, advantages or (0.0,) * len(texts), strict=True)
    return Group(task, tuple(Rollout(completion, score, advantage) for completion, score, advantage in rollouts))


def make_report(step: int = 1, *, step_s: float = 8.0, groups: tuple[Group, ...] = (), **metrics: float) -> StepReport:
    defaults = {"loss": 0.1 / step, "reward": 0.1 * step, "kl_penalty": 0.001 * step, "grad_norm": 1 / 3, "unscored": 0}
    timings = {"generation": 0.5 * step_s, "policy_training": 0.25 * step_s, "total_step_time": step_s}
    return StepReport(defaults | metrics, timings, groups, num_tokens=1000, num_samples=20)


@pytest.fixture
def group() -> Any:
    return make_group


@pytest.fixture
def report() -> Any:
    return make_report
