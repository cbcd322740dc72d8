"""How a kind of run is shown: the metrics of a step on the console, and the headline of its summary and report.

Recipes define these values; this package does not depend on the kinds. The headline is stored in `run.json`, so that a
report can be rendered from the run folder alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from posttrain.config.base import parse_as
from posttrain.errors import InputError
from posttrain.reporting.rows import Hardware

if TYPE_CHECKING:
    from posttrain.config.changes import ConfigChange


@dataclass(frozen=True)
class ShownMetric:
    """A training metric on the console."""

    key: str  # without train/
    name: str  # in the block of a step
    short_name: str = ""  # on the line of a short step; empty leaves it out there


@dataclass(frozen=True)
class Band:
    """Values of a metric at which something is probably wrong: those above, or below, a threshold of the doctor."""

    level: Literal["warning", "error"]
    above: float | None = None
    below: float | None = None
    of_start: bool = False  # the threshold is a share of the value that the run began with

    def at(self, start: float | None) -> Band | None:
        """With an absolute threshold; None while the start is not known."""
        if not self.of_start:
            return self
        if start is None:
            return None
        above, below = (None if limit is None else limit * start for limit in (self.above, self.below))
        return Band(self.level, above, below)

    def holds(self, value: float) -> bool:
        return (self.above is not None and value > self.above) or (self.below is not None and value < self.below)


@dataclass(frozen=True)
class ChartSpec:
    title: str
    curves: tuple[tuple[str, str], ...]  # (key, name) of each
    note: str = ""  # what to look for; {device} stands for the word for a device
    bands: tuple[Band, ...] = ()  # of the first curve

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.curves)

    def note_for(self, device: str) -> str:
        """Not a format string: the note and the word may come from the run.json of somebody else."""
        return self.note.replace("{device}", device)


@dataclass(frozen=True)
class Headline:
    """The training metric that a run is judged by, and the first chart of its report."""

    metric: str
    name: str
    lower_is_better: bool
    chart: ChartSpec


@dataclass(frozen=True)
class Presentation:
    kind: str  # of run, as it is shown
    headline: Headline
    results: tuple[ShownMetric, ...]  # in their order on the console


@dataclass(frozen=True)
class RecorderSettings:
    """What is recorded of a run beside its steps, and how it is shown."""

    presentation: Presentation
    max_steps: int
    hardware: Hardware
    config_yaml: str
    changes_since: Callable[[str], Sequence[ConfigChange]] = lambda config_yaml: ()  # from another config.yaml
    title: str = ""
    header: Sequence[str] = ()  # what is trained, on what and how
    device_word: str = "device"
    refit_remark: str = ""  # what handing new weights to the sampler means in this run
    settings: Mapping[str, object] = field(default_factory=dict)  # by dotted keys
    num_val_samples_to_print: int = 0
    quiet: bool = False
    verbose: bool = False  # a console gets the long form
    stop_on_error: bool = False  # that the doctor finds


def headline_from_json(row: object, keys: Collection[str]) -> Headline:
    """The headline that `run.json` holds. Earlier versions stored none: then it follows from the metrics."""
    with suppress(InputError):
        return parse_as(Headline, row, "headline")
    name = next((name for name in ("reward", "accuracy") if f"train/{name}" in keys), "loss")
    validation = "loss" if name == "loss" else "accuracy"
    curves = ((f"train/{name}", "training"), (f"validation/{validation}", "validation"))
    return Headline(f"train/{name}", name.capitalize(), name == "loss", ChartSpec(name.capitalize(), curves))
