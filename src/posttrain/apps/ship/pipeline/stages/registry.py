"""registry: adds the model as the next version, a candidate, with its lineage and the gate's verdict.

A rejected model is registered too, so that the history shows what was tried. Without a verdict nothing is registered.
The stage's key is written to the version's note, so that a kill before `stage.json` is written does not add it twice.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from posttrain.apps.ship.pipeline.iteration_models import place_in_registry, registry_of, versions_of
from posttrain.apps.ship.pipeline.records import StageName, StageOutcome, StageRecord, key_of
from posttrain.apps.ship.pipeline.stage import Stage, StageContext
from posttrain.apps.ship.pipeline.stages.gate import verdict_of
from posttrain.apps.ship.registry.version import ModelVersion, as_row
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject

READS: tuple[StageName, ...] = ("dataset", "train", "convert", "evaluate", "gate")


def check(config: PipelineConfig) -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise InputError("registry: needs MLflow: pip install 'posttrain[registry]'; or stop with --until gate")
    folder = registry_of(config).location.folder
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"registry.location: {folder} is a file; a folder, or an address of MLflow, is needed")


def inputs(context: StageContext) -> JsonObject:
    return {"settings": place_in_registry(context.config)}


def skip(context: StageContext) -> str | None:
    undecided = verdict_of(context) == "needs_more_samples"
    return "the gate has not decided: more samples are needed" if undecided else None


def missing(stage: Stage, record: StageRecord, config: PipelineConfig) -> str | None:
    number = record.outcome.values["version"]
    is_known = any(version.version == number for version in versions_of(config))
    return None if is_known else f"version {number} in the registry"


def work(context: StageContext, folder: Path) -> StageOutcome:
    # The same for every attempt of the same work.
    outcomes = {name: context.before[name].outcome.digest for name in READS}
    redone = context.iteration.redone.get("registry", 0)
    mark = f"pipeline stage {key_of({'inputs': inputs(context), 'outcomes': outcomes, 'redone': redone})[:16]}"
    known = (version for version in versions_of(context.config) if mark in version.note)
    version = next(known, None) or _add(context, mark)
    row = {key: value for key, value in as_row(version).items() if key != "stage"}  # a stage may change later
    durable.write_text(folder / "version.json", json.dumps(row, indent=2, default=str) + "\n")
    return StageOutcome(
        digest=digest([version.name, version.version, inputs(context)]),
        headline=f"{version.reference}, candidate",
        values={"version": version.version, "reference": version.reference},
        report="version.json",
    )


def _add(context: StageContext, mark: str) -> ModelVersion:
    from posttrain.apps.ship.registry import gather_lineage

    before, iteration = context.before, context.iteration
    measured = before["evaluate"]
    trained = before["train"]
    value = trained.outcome.values["value"]
    lineage = gather_lineage(
        before["convert"].path("model"),
        base_model=iteration.start.text,
        config=trained.folder / "train.yaml",
        data=[str(before["dataset"].path("file"))],
        evaluations={name: measured.folder / path for name, path in measured.outcome.values["candidate"].items()},
        metrics={} if value is None else {f"training/{trained.outcome.values['metric']}": value},
        gate=before["gate"].path("file"),
    )
    return registry_of(context.config).add(
        context.config.pipeline.name,
        before["convert"].path("model"),
        lineage,
        note=f"iteration {iteration.number} of the pipeline in {context.home}; {mark}",
    )
