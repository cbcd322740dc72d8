"""The roles that posttrain is made of. Protocols only: who implements them is decided in `build.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from posttrain.types import (
    Completion,
    NoiseKey,
    Sampling,
    Score,
    StepReport,
    TakenGroups,
    Task,
    TokenBatch,
    UpdateReport,
)

Progress = Callable[[int], None]  # called with the number of units that have just been finished
ShowProgress = Callable[
    [str, int], AbstractContextManager[Progress]
]  # (label, total) -> a bar for the time of the block


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Progress]:
    yield lambda _: None


class Objective(Protocol):
    """A loss: a small picklable value that runs on every rank.

    It gets the log-probabilities of the response tokens of one micro-batch and returns a *sum* already divided by the
    batch's denominators, so that adding micro-batches up gives the loss of the whole batch.
    """

    keeps_groups_whole: bool  # responses of one prompt must meet in one micro-batch (preference pairs)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class Policy(Protocol):
    """The model being trained, on any number of ranks."""

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport: ...

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport: ...

    def logprobs(self, batch: TokenBatch) -> Tensor: ...

    def reference_logprobs(self, batch: TokenBatch) -> Tensor: ...

    def end_step(self) -> None:
        """One step of the algorithm is over: the learning-rate schedule moves on."""

    def save(self, folder: Path, *, optimizer: bool) -> None: ...

    def load(self, folder: Path) -> None: ...


class Generator(Protocol):
    """Samples completions: for each task, `num_samples` of them in sample order."""

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]: ...


class Environment(Protocol):
    """Judges completions. It never raises for a completion that cannot be judged: that one comes back unscored."""

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]: ...

    def close(self) -> None: ...


class RolloutSource(Protocol):
    """Hands out scored groups. Fresh, recorded, in several turns, filtered: that is the source's own affair."""

    def take(self, num_groups: int, step: int) -> TakenGroups:
        """`num_groups` groups for training step `step`, counted from 1; validation and evaluation give the last one."""


class Stateful(Protocol):
    """Something whose position is part of the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Algorithm(Protocol):
    """What the loop drives: one training step, one validation."""

    def step(self, step: int) -> StepReport: ...

    def validate(self, step: int) -> StepReport | None: ...


class Recorder(Protocol):
    """Writes what happened to the run folder and shows it to people."""

    def record_step(self, step: int, report: StepReport, validation: StepReport | None) -> None: ...

    def progress(self, label: str, total: int) -> AbstractContextManager[Progress]: ...
