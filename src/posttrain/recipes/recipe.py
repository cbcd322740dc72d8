"""Recipe interface: which data a run reads, which algorithm trains on it, and how progress is shown.

The header of a run, shown before the first step, says what is trained, on what, how, and where it is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Protocol

import yaml

from posttrain.config import DataConfig, DpoRunConfig, GrpoRunConfig, RunConfig
from posttrain.config.policy import automatic_schedule
from posttrain.data.chat import ChatFormat
from posttrain.data.entries import Entries
from posttrain.data.readers import Item
from posttrain.data.row_dataset import RowDataset, Stream
from posttrain.environments.python_function import named_arguments
from posttrain.files.json_files import JsonObject
from posttrain.orchestration.sharded import ShardedTrainer
from posttrain.orchestration.workers import WorkerGroup
from posttrain.policy.trainer import ModelFacts
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


@dataclass(frozen=True, kw_only=True)
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
    # Takes what to call when the run is asked to stop.
    when_stopped: Callable[[Callable[[], None]], None] = lambda listener: None
    beside: Callable[[str], WorkerGroup | None] = lambda name: None  # worker groups on devices of their own


@dataclass(frozen=True)
class Prepared:
    """The data of a run, read before the model is loaded, and how to build the algorithm that trains on it."""

    train: Rows
    validation: Rows | None
    position: Stateful  # position in the data, and other data state in a checkpoint
    algorithm: Callable[[RunParts], Algorithm]
    unit: str  # what the data is counted in, such as prompts


@dataclass(frozen=True)
class Recipe(ABC):
    """One kind of run. What follows from the config alone, such as sizes, is in `config/run_config.py`."""

    config: RunConfig
    presentation: ClassVar[Presentation]
    chat_form: ClassVar[type[ChatFormat]] = ChatFormat

    def shown(self) -> Presentation:
        """How this run is shown."""
        return self.presentation

    def trainer_type(self) -> Callable[..., ShardedTrainer]:
        """What the ranks train."""
        return ShardedTrainer

    def beside(self) -> Mapping[str, Callable[[], object]]:
        """What makes a member of each worker group of the placement that this kind of run has of its own."""
        return {}

    def check(self) -> None:  # noqa: B027 - most kinds need nothing else
        """InputError if something that the run needs beside data and model is missing."""

    @abstractmethod
    def prepare(self, chat: ChatFormat) -> Prepared:
        """Read the data."""

    def _of_answers(
        self,
        unit: str,
        chat: ChatFormat,
        load: Callable[..., RowDataset[Item]],
        num_held_out: int,
        build: Callable[[RunParts, Stream[Item], Sequence[Item]], Algorithm],
        **how: bool,
    ) -> Prepared:
        """Of a kind of run that trains on the answers of its data: `load`, with `how`, reads one of its datasets, and
        `build` gets the stream of answers and the held-out rows.
        """
        data, seed, limit = self.config.data, self.config.schedule.seed, self.config.policy.max_total_sequence_length
        read = partial(load, defaults=data.default, chat=chat, max_total_tokens=limit, seed=seed, **how)
        train, validation = load_both(data, read)
        stream = Stream(train, seed, data.shuffle)
        held_out = partial(first_rows, validation, num_held_out)
        return Prepared(train, validation, stream, lambda parts: build(parts, stream, held_out()), unit)


@cache
def presentation_of(kind: str) -> Presentation:
    """How a kind of run is shown, from `presentations.yaml`."""
    rows = yaml.safe_load(Path(__file__).with_name("presentations.yaml").read_text())[kind]
    chart = {**rows["chart"], "curves": tuple(map(tuple, rows["chart"]["curves"]))}
    headline = Headline(**rows["headline"], chart=ChartSpec(**chart))
    return Presentation(kind, headline, tuple(ShownMetric(*row) for row in rows["metrics"]))


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


LONG_STEP_ON_CPU = 10**12  # parameters x generated tokens; two to three minutes on two cores


def header_lines(
    config: RunConfig,
    prepared: Prepared,
    facts: ModelFacts,
    *,
    num_devices: int,
    max_steps: int,
    planned: str,
    unused_epochs: str,
) -> list[str]:
    """`planned`: predicted memory and time; empty if there is no prediction. `unused_epochs`: see `LoadedConfig`."""
    policy, sizes = config.policy, config.step_sizes()
    lora = policy.dtensor_cfg.lora_cfg
    trained = "all weights are trained"
    if lora.enabled:
        trained = f"{_count(facts.num_trained)} of them trained: LoRA adapters of rank {lora.dim}"
    held_out = f", {len(prepared.validation):,} held out" if prepared.validation is not None else ""
    each = f" x {sizes.num_answers_per_row} answers" if isinstance(config, GrpoRunConfig) else ""
    updates = f" in {sizes.num_updates} updates" if sizes.num_updates > 1 else ""
    rows = {
        "model": f"{policy.model_name}, {_count(facts.num_parameters)} parameters, {trained}",
        "devices": f"{num_devices} x {facts.device_name}, {policy.precision}",
        "data": f"{len(prepared.train):,} {prepared.unit}{held_out}",
        "step": f"{sizes.num_rows} {prepared.unit}{each}{updates}; {max_steps:,} step{'' if max_steps == 1 else 's'}",
        "on a CPU": _long_step(config, facts),
        "epochs": f"{unused_epochs} is not used: steps is given" if unused_epochs else "",
        "settings": ", ".join(_settings(config, max_steps)),
        "planned": planned,
    }
    return [f"{name:<9}{text}" for name, text in rows.items() if text]


def _long_step(config: RunConfig, facts: ModelFacts) -> str:
    """What makes the steps of a run smaller that would take minutes each."""
    if facts.device != "cpu" or not isinstance(config, GrpoRunConfig) or config.uses_recorded_answers:
        return ""
    sizes, longest = config.step_sizes(), config.policy.generation.max_new_tokens
    tokens = sizes.num_rows * sizes.num_answers_per_row * longest
    if tokens * facts.num_parameters < LONG_STEP_ON_CPU:
        return ""
    return f"a step of up to {tokens:,} tokens takes minutes; smaller: prompts=2 generations=4 max_new_tokens=64"


def _settings(config: RunConfig, max_steps: int) -> Sequence[str]:
    lr = config.policy.optimizer.kwargs.get("lr")
    schedule = config.policy.scheduler
    schedule = automatic_schedule(max_steps) if schedule == "auto" else schedule
    found = [_learning_rate(lr, schedule, max_steps)] if isinstance(lr, int | float) else []
    if isinstance(config, GrpoRunConfig):
        penalty, period = config.loss_fn.reference_policy_kl_penalty, config.kl_period
        measured = f"estimated every {period} steps" if period else "not measured (doctor.kl_period=10 estimates it)"
        found.append(f"KL penalty {penalty:g}" if penalty else f"no KL penalty, KL {measured}")
        default = config.data.default.env_name if config.data.default is not None else None
        names = dict.fromkeys(entry.env_name or default for entry in config.data.train_sets())
        used = [name for name in names if name]
        functions = [getattr(config.env.get(name), "function", None) for name in used]
        rewards = [named_arguments(f, Path.cwd()) if f else name for f, name in zip(functions, used, strict=True)]
        found.append(f"reward {', '.join(rewards) or 'of the traces'}")
    if isinstance(config, DpoRunConfig):
        found.append(f"{config.dpo.preference_loss} loss, beta {config.dpo.reference_policy_kl_penalty:g}")
    return found


def _learning_rate(lr: float, scheduler: list[JsonObject] | JsonObject | None, max_steps: int) -> str:
    """With the warm-up, if the schedule begins with one."""
    first = (scheduler[0] if isinstance(scheduler, list) else scheduler) if scheduler else {}
    kwargs = first.get("kwargs") or {}
    start, end, steps = kwargs.get("start_factor", 1 / 3), kwargs.get("end_factor", 1.0), kwargs.get("total_iters", 5)
    if not first.get("name", "").endswith("LinearLR") or start >= end:
        return f"lr {lr:g}"
    if max_steps > steps:
        return f"lr {lr * end:g} after a warm-up of {steps} steps"
    reached = lr * (start + (end - start) * (max_steps - 1) / steps)
    return f"lr at most {reached:.3g}, as the warm-up to {lr * end:g} takes {steps} steps (policy.scheduler=null: none)"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
