"""The training loop among fakes, except for the saver and the checkpoint folder, which are real."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes import Events, FakeAlgorithm, FakeRecorder, FakeStream, FakeTrainer

from posttrain.checkpointing import CheckpointStore, SaveDeadline
from posttrain.checkpointing.save_and_resume import CheckpointSaver, SaverSettings
from posttrain.files.run_folder_lock import Attempt
from posttrain.loop import LoopSettings, TrainingLoop


@dataclass
class Scene:
    """A loop among fakes, except for the saver and the checkpoint folder, which are real."""

    loop: TrainingLoop
    saver: CheckpointSaver
    events: Events
    recorder: FakeRecorder
    algorithm: FakeAlgorithm
    policy: FakeTrainer
    stream: FakeStream
    folder: Path

    def of_kind(self, *kinds: str) -> Events:
        return [event[:2] for event in self.events if event[0] in kinds]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*step_*"))

    def info(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / f"step_{step}" / "training_info.json").read_text())


def scene(
    folder: Path,
    deadline: SaveDeadline | None = None,
    *,
    max_steps: int = 6,
    save: bool = True,
    save_period: int = 100,
    metric_name: str | None = None,
    async_save: bool = False,
    save_optimizer: bool = True,
    attempt: Attempt | None = None,
    **settings: Any,
) -> Scene:
    events: Events = []
    recorder = FakeRecorder(events)
    algorithm, trainer, stream = FakeAlgorithm(events), FakeTrainer(events), FakeStream()
    store = CheckpointStore(
        folder,
        metric_name=metric_name,
        save_period=save_period,
        say=recorder.say,
        attempt=attempt,
    )
    saver = CheckpointSaver(
        SaverSettings(
            save,
            save_period,
            save_optimizer,
            samples_per_step=4,
            steps_per_epoch=2.5,
            metric_name=metric_name,
            in_background=async_save,
        ),
        trainer,
        stream,
        recorder,
        store,
        "config: 1\n",
    )
    validation = {"val_period": 0, "val_start_at": -1, "val_at_start": False, "val_at_end": False}
    chosen = LoopSettings(max_steps=max_steps, **{**validation, **settings})
    loop = TrainingLoop(chosen, algorithm, recorder, saver, deadline or SaveDeadline(None))

    def move_on(step: int) -> None:
        stream.position += 4
        trainer.num_updates += 2

    algorithm.during_step = move_on
    return Scene(loop, saver, events, recorder, algorithm, trainer, stream, folder)
