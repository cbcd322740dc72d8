"""Recipe interface: which data a run reads, which algorithm trains on it, and how progress is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Protocol

from posttrain.config import DataConfig, RunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.entries import Entries
from posttrain.data.readers import Item
from posttrain.data.row_dataset import RowDataset
from posttrain.reporting.presentation import ChartSpec, Headline, Presentation, ShownMetric
from posttrain.roles import Algorithm, RoundEngine, ShowProgress, Stateful, Trainer, WeightSync


class Rows(Protocol):
    """A loaded dataset, as used by every kind of run."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows that were left out, by reason."""

    @property
    def noted(self) -> Mapping[str, int]:
        """Rows with something remarkable, by reason."""

    @property
    def pack_size(self) -> int:
        """Tokens of a precomputed pack, which is not split; 0 without packs."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class RunParts:
    """What an algorithm is built from, once the model is loaded."""

    policy: Trainer
    engine: RoundEngine
    weights: WeightSync
    show_progress: ShowProgress
    announce: Callable[[str], None]  # takes the name of a stage of the step
    warn: Callable[[str], None]
    max_steps: int  # of the run
    cleanup: ExitStack  # closed when the run ends
    when_stopped: Callable[[Callable[[], None]], None] = lambda listener: (
        None
    )  # what to call when the run is asked to stop


@dataclass(frozen=True)
class Prepared:
    """The data of a run, read before the model is loaded, and how to build the algorithm that trains on it."""

    train: Rows
    validation: Rows | None
    position: Stateful  # position in the data, and other data state in a checkpoint
    algorithm: Callable[[RunParts], Algorithm]


@dataclass(frozen=True)
class Recipe(ABC):
    """One kind of run. What follows from the config alone, such as sizes and the reference, is in `config/run_config.py`."""

    config: RunConfig
    presentation: ClassVar[Presentation]
    chat_form: ClassVar[type[ChatFormat]] = ChatFormat

    @property
    @abstractmethod
    def unit(self) -> str:
        """What a dataset of this kind of run is counted in, such as prompts."""

    def check(self) -> None:  # noqa: B027 - most kinds need nothing else
        """InputError if something that the run needs beside data and model is missing."""

    @abstractmethod
    def prepare(self, chat: ChatFormat) -> Prepared:
        """Read the data."""


PAIR_RESULTS = (
    ShownMetric("accuracy", "Accuracy", "accuracy"),
    ShownMetric("rewards_chosen_mean", "Chosen Reward", "chosen"),
    ShownMetric("rewards_rejected_mean", "Rejected Reward", "rejected"),
)


def pair_accuracy(note: str) -> Headline:
    """The headline metrics of pair-based training."""
    curves = (("train/accuracy", "training"), ("validation/accuracy", "validation"))
    chart = ChartSpec("Preference accuracy", curves, note)
    return Headline("train/accuracy", "Pair accuracy", lower_is_better=False, chart=chart)


def load_both(
    data: DataConfig, load: Callable[[Entries], RowDataset[Item]]
) -> tuple[RowDataset[Item], RowDataset[Item] | None]:
    """Training data, and validation data or None: a separate dataset, or rows held out from training."""
    assert data.train is not None, "refused when the config is loaded"
    train = load(data.train)
    if data.validation is not None:
        return train, load(data.validation)
    return train.held_out()


def first_rows(dataset: RowDataset[Item] | None, count: int) -> Sequence[Item]:
    """The first `count` rows; all of them if it is not positive."""
    if dataset is None:
        return []
    return [dataset[i] for i in range(len(dataset) if count <= 0 else min(count, len(dataset)))]
