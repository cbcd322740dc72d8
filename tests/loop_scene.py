"""The training loop among fakes, except for the checkpoint folder, which is real."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.checkpointing import CheckpointStore, SaveDeadline
from posttrain.loop import LoopSettings, TrainingLoop
from posttrain.types import StepReport

Events = list[tuple[Any, ...]]

SETTINGS = LoopSettings(
    max_steps=6,
    samples_per_step=4,
    steps_per_epoch=2.5,
    val_period=0,
    val_start_at=-1,
    val_at_start=False,
    val_at_end=False,
    save=True,
    save_period=100,
    save_optimizer=True,
    metric_name=None,
)


@dataclass
class FakeAlgorithm:
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
class FakePolicy:
    events: Events
    num_updates: int = 0

    def save(self, folder: Path, *, optimizer: bool) -> None:
        self.events.append(("save", folder.name.removeprefix("tmp_"), optimizer))
        (folder / "weights").write_text("weights")

    def load(self, folder: Path) -> None:
        self.events.append(("load", folder.name))


@dataclass
class CopyingPolicy(FakePolicy):
    """One that can write while training goes on."""

    obstacle: str = ""
    writing: Callable[[str], None] = lambda name: None  # called in the thread that writes

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
class Scene:
    """A loop among fakes, except for the checkpoint folder, which is real."""

    loop: TrainingLoop
    events: Events
    recorder: FakeRecorder
    algorithm: FakeAlgorithm
    policy: CopyingPolicy
    stream: FakeStream
    folder: Path

    def of_kind(self, *kinds: str) -> Events:
        return [event[:2] for event in self.events if event[0] in kinds]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*step_*"))

    def info(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / f"step_{step}" / "training_info.json").read_text())


def scene(folder: Path, deadline: SaveDeadline | None = None, **settings: Any) -> Scene:
    events: Events = []
    recorder: Any = FakeRecorder(events)
    algorithm, policy, stream = FakeAlgorithm(events), CopyingPolicy(events), FakeStream()
    chosen = replace(SETTINGS, **settings)
    store = CheckpointStore(
        folder,
        keep_top_k=None,
        metric_name=chosen.metric_name,
        higher_is_better=True,
        save_period=chosen.save_period,
        say=recorder.say,
    )
    policy_role: Any = policy
    loop = TrainingLoop(
        chosen, algorithm, policy_role, stream, recorder, store, deadline or SaveDeadline(None), "config: 1\n"
    )

    def move_on(step: int) -> None:
        stream.position += 4
        policy.num_updates += 2

    algorithm.during_step = move_on
    return Scene(loop, events, recorder, algorithm, policy, stream, folder)
