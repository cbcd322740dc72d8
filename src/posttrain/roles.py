"""The roles that posttrain is made of. Protocols only: implementations are chosen in the composition root.

One training step: a `RolloutSource` asks an `Engine` for completions and an `Environment` for their scores; an
`Algorithm` turns them into batches for the `Trainer`, which minimises an `Objective`; `WeightSync` hands the new
weights to the engine. The loop drives the algorithm, the `Recorder` writes what happened, the `Saver` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from posttrain.errors import ExitCode
from posttrain.types import (
    Completion,
    NoiseKey,
    OpenGroup,
    PrefillTokens,
    Quota,
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


class ReferencePolicy(Protocol):
    """The frozen starting policy that a trainer can evaluate."""

    def reference_logprobs(self, batch: TokenBatch) -> Tensor: ...

    def reference_fingerprint(self) -> str:
        """A digest of everything that determines `reference_logprobs`, whatever the number of ranks."""


class Trainer(ReferencePolicy, Protocol):
    """The model being trained, on any number of ranks."""

    num_updates: int  # optimizer steps so far; it seeds dropout, so it is part of a checkpoint

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport: ...

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport: ...

    def logprobs(self, batch: TokenBatch) -> Tensor: ...

    def end_step(self) -> None:
        """One step of the algorithm is over: the learning-rate schedule advances."""

    def save(self, folder: Path, *, optimizer: bool) -> None: ...

    def load(self, folder: Path) -> None: ...

    def save_obstacle(self, *, optimizer: bool) -> str:
        """Why `begin_save` cannot be used; empty if it can. Call it after the first update."""

    def prepare_save(self, *, optimizer: bool) -> bool:
        """Allocate memory for `begin_save` ahead of time. True once all ranks have it; call again until then."""

    def begin_save(self, folder: Path, *, optimizer: bool) -> Callable[[Callable[[], bool]], None]:
        """Copy the state as it is now. Returns the function that writes it, for a background thread.

        Its argument returns True once the run has failed, so that waiting for other ranks ends.
        """

    def take_save_wait_s(self) -> float:
        """Seconds that updates have waited for copies of `begin_save` since the last call; of the slowest rank."""


class Engine(Protocol):
    """Samples completions: for each task, `num_samples` of them in sample order."""

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]: ...

    def release(self) -> None:
        """Free the memory that is held between calls, such as the KV cache. The next call allocates it again."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """An engine that can reuse in one call what earlier calls have computed."""

    def keep_prefixes(self, wanted: bool) -> PrefillTokens | None:
        """Begin or end to keep it. Nothing that was computed before this call is reused after it. Returns what was
        prefilled since the last call; None if that is unknown.
        """


class RoundEngine(Engine, Protocol):
    """An engine that can stop when enough groups are whole, and continue the answers of the others later."""

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        """The groups, in order, with more tokens: their `Unfinished` answers continue where they were, until `quota` is
        met, or to their ends if there is none. `versions` are as given."""


UNKNOWN_VERSION = -1  # of weights that an engine took before any were published


class RankEngine(RoundEngine, KeepsPrefixes, Protocol):
    """The engine of one rank. It samples with the weights of the rank's trainer."""

    shares_tensors: bool  # samples from the trainer's own tensors, so ranks that share layers sample together
    should_stop: Callable[[], bool]  # checked while sampling; True ends the call with StopRequested

    @property
    def has_weights(self) -> bool:
        """Whether it can sample. If not, `take_weights` comes first."""

    def take_weights(self, version: int) -> None:
        """Sample from here on with the trainer's weights as they are now. Collective on sharded ranks."""

    def forget_weights(self) -> None:
        """The trainer has loaded other weights: take them before the next sampling call."""

    def make_room(self) -> None:
        """Free memory of the device for the trainer, unless what is held is small and worth keeping."""

    def close(self) -> None:
        """Stop processes that the engine has started."""


class WeightSync(Protocol):
    """Hands the trainer's weights to the engine."""

    def publish(self, version: int) -> None:
        """Return once the engine samples with the weights as they are now, known as `version` from here on."""


class Environment(Protocol):
    """Scores completions. One that cannot be scored comes back unscored, with the reason: that is not an error."""

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]: ...

    def close(self) -> None: ...


class RolloutSource(Protocol):
    """Hands out scored groups: fresh, recorded, in several turns, or filtered."""

    def take(self, num_groups: int, step: int) -> TakenGroups:
        """`num_groups` scored groups for training step `step`, counted from 1.

        In validation `step` is the last finished one, 0 before training; in an evaluation it is 0.
        """


class Stateful(Protocol):
    """Something whose position is part of the checkpoint."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class Algorithm(Protocol):
    """What the loop drives: one training step, one validation."""

    def step(self, step: int) -> StepReport: ...

    def validate(self, step: int) -> StepReport | None: ...


class StopPoints(Protocol):
    """Where a step may end early because the run was asked to stop: StopRequested is raised, and the step is repeated
    later.
    """

    def check(self) -> None: ...

    def commit(self) -> None:
        """The last such point of a step: the model changes after it."""


class Recorder(Protocol):
    """Writes what happened to the run folder and shows it on the console."""

    def start(self, resumed_step: int) -> None:
        """Prepare the run folder for step `resumed_step` + 1; 0 is a fresh run."""

    def begin_step(self, step: int) -> None: ...

    def record_step(self, step: int, report: StepReport, validation: StepReport | None) -> None:
        """Everything of the step is on disk when this returns."""

    def record_save(self, step: int, seconds: float, tokenizer: str) -> None:
        """A checkpoint of `step` blocked the run for `seconds`; its tokenizer is in the folder `tokenizer`."""

    def reason_to_stop(self) -> str | None:
        """A problem, found in the latest step, for which the user wants the run to stop; None: there is none."""

    def record_validation(self, step: int, validation: StepReport) -> None:
        """A validation that comes without its training step: the one before training, or one that is made up for."""

    def finish(self, reason: str, *, is_stopped: bool = False) -> ExitCode:
        """Show and write how the run ended. Returns DONE; CRASHED if files of earlier steps were deleted while the run
        went on; NO_PROGRESS if of no rollout a reward is known.

        `is_stopped`: it was asked to stop, and goes on when it is started again, also after its last step.
        """

    def progress(self, label: str, total: int) -> AbstractContextManager[Progress]: ...

    def stage(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


Finished = tuple[StepReport, StepReport | None]  # a step's report, and that of its validation


class Saver(Protocol):
    """Keeps checkpoints of the whole run, in the background where possible, and resumes from the newest one."""

    @property
    def is_enabled(self) -> bool: ...

    @property
    def owes_validation(self) -> bool:
        """The run was stopped before a validation that was due after the step that it resumes from."""

    def resume(self) -> int:
        """Load the newest complete checkpoint. Returns the step it was saved after, or 0."""

    def with_timings(self, report: StepReport) -> StepReport:
        """The report with the time that saving has blocked the run since the last call."""

    def note_validation(self) -> None:
        """The run validates: a checkpoint without a validation, which cannot be ranked by it, gets a warning."""

    def begin_step(self) -> None:
        """Remember where data and random generators are: a step that is left undone is repeated from here."""

    def after_step(
        self, step: int, report: StepReport, validation: StepReport | None, *, is_last: bool, is_wanted: bool = False
    ) -> None:
        """Save if a checkpoint is due after this step; always after the last one, and when one `is_wanted`."""

    def save_and_stop(
        self, step: int, finished: Finished | None, *, owes_validation: bool, seconds_left: float | None
    ) -> str:
        """Save the state after `step`, unless that would take longer than `seconds_left`. Returns why it is not saved;
        empty if it is.

        `finished` is None if the step after `step` was begun and left undone.
        """

    def abandon(self, error: Exception) -> None:
        """The run failed. Finish the checkpoint that is being written if possible; note on `error` if it is lost."""
