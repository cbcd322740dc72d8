"""The KPI of a pipeline, one row per iteration: training metric, held-out score, cost and time.

All values are read from the records, except for the stage of a version, which may change at any time: it is looked up
in the registry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.apps.ship.pipeline.iteration_models import place_in_registry, versions_of
from posttrain.apps.ship.pipeline.predicted_cost import TrainingCost, actual_cost, predicted_cost
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, StageRecord, read_iterations
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.json_files import JsonObject

KPI_FILE = "kpi.json"
DEVICE_STAGES = ("train", "convert", "evaluate")  # those that keep a device busy


@dataclass(frozen=True)
class KpiRow:
    """None: not available yet."""

    iteration: int
    begun_at: str
    finished: bool
    start: str  # the model that was trained
    traces_reward: float | None  # mean reward of the traces
    dataset: str | None  # "1,000 pairs"
    training_metric: str | None  # "reward" (GRPO), "accuracy" of the pairs (DPO)
    training_value: float | None  # its mean over the last steps
    score_metric: str | None
    score: float | None  # of the first evaluation: the candidate's
    score_low: float | None
    score_high: float | None
    incumbent_score: float | None  # of the model that it was compared with
    verdict: str | None
    version: int | None
    stage: str | None  # of the version, now; None also if the registry cannot be read
    seconds: float  # of the stages that ran in this iteration, without reused ones
    device_hours: float
    cost: float | None  # device hours times pipeline.gpu_hour_price
    predicted: TrainingCost | None  # of the training, before it began
    not_predicted: str | None  # why it was not
    actual: TrainingCost | None  # of the training, at the same price; None also if it was reused

    @property
    def reached(self) -> str:
        """The state of the iteration in one word."""
        if self.verdict is None:
            return "not finished"
        words = {"promote": "promoted", "reject": "rejected", "needs_more_samples": "undecided"}
        return words[self.verdict] if self.finished or self.verdict != "promote" else "not finished"


def kpi_rows(config: PipelineConfig) -> list[KpiRow]:
    iterations = read_iterations(Path(config.pipeline.folder))
    stages = _stages_now(iterations, config)
    return [_row(iteration, config, stages.get(iteration.number)) for iteration in iterations]


def _stages_now(iterations: Sequence[Iteration], config: PipelineConfig) -> dict[int, str]:
    """By iteration, the stage of its version; empty if the registry cannot be read."""
    here = place_in_registry(config)
    records = {iteration.number: iteration.record("registry") for iteration in iterations}
    versions = {
        number: record.outcome.values["version"]
        for number, record in records.items()
        if record is not None and record.inputs.get("settings") == here
    }
    if not versions:
        return {}
    try:
        stages = {version.version: version.stage for version in versions_of(config)}
    except InputError:
        return {}
    return {number: stages[version] for number, version in versions.items() if version in stages}


def write_kpi(config: PipelineConfig, rows: Sequence[KpiRow]) -> None:
    file = Path(config.pipeline.folder) / KPI_FILE
    durable.write_text(file, json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _row(iteration: Iteration, config: PipelineConfig, stage: str | None) -> KpiRow:
    records: dict[str, StageRecord] = {
        name: record for name in STAGES if (record := iteration.record(name)) is not None
    }
    own = {name: record for name, record in records.items() if not iteration.stages[name].reused}
    trained, measured = _values(records, "train"), _values(records, "evaluate")
    low, high = measured.get("interval") or (None, None)
    busy = [own[name] for name in DEVICE_STAGES if name in own]
    hours = sum((record.seconds * record.outcome.values.get("num_devices", 1) / 3600 for record in busy), 0.0)
    price = config.pipeline.gpu_hour_price
    dataset, paid = records.get("dataset"), _values(own, "train")
    return KpiRow(
        iteration=iteration.number,
        begun_at=iteration.begun_at,
        finished=iteration.finished,
        start=iteration.start.text,
        traces_reward=_values(records, "traces").get("mean_reward"),
        dataset=None if dataset is None else dataset.outcome.headline,
        training_metric=trained.get("metric"),
        training_value=trained.get("value"),
        score_metric=measured.get("metric"),
        score=measured.get("score"),
        score_low=low,
        score_high=high,
        incumbent_score=measured.get("incumbent_score"),
        verdict=_values(records, "gate").get("verdict"),
        version=_values(records, "registry").get("version"),
        stage=stage,
        seconds=sum(record.seconds for record in own.values()),
        device_hours=hours,
        cost=None if price is None else price * hours,
        predicted=predicted_cost(paid) if paid else None,
        not_predicted=paid.get("not_predicted"),
        actual=actual_cost(paid, own["train"].seconds) if paid else None,
    )


def _values(records: dict[str, StageRecord], name: str) -> JsonObject:
    return dict(records[name].outcome.values) if name in records else {}
