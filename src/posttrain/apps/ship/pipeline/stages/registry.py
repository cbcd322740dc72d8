"""registry: adds the model as the next version, a candidate, with its lineage and the gate's verdict.

A rejected model is registered too, so that the history shows what was tried. Without a verdict nothing is registered.
The stage's key is written to the version's note, so that a kill before `stage.json` is written does not add it twice.
canary: moves the version to the stage canary, and writes how a server splits the traffic. The pipeline does not start
servers: use `serve.sh`, or the values in `serve.yaml`.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import yaml

from posttrain.apps.serve.canary import CanaryRules
from posttrain.apps.ship.pipeline.iteration_models import place_in_registry, registry_of, versions_of
from posttrain.apps.ship.pipeline.records import ModelChoice, StageOutcome, StageRecord, key_of
from posttrain.apps.ship.pipeline.stage import Stage, StageContext, about
from posttrain.apps.ship.pipeline.stages.evaluate import verdict_of
from posttrain.apps.ship.registry.version import ModelVersion, as_row
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject

SERVE_FILE, SERVE_SCRIPT = "serve.yaml", "serve.sh"


class Register(Stage):
    name = "registry"
    reads = ("dataset", "train", "convert", "evaluate", "gate")

    def check(self, config: PipelineConfig) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise InputError("registry: needs MLflow: pip install 'posttrain[registry]'; or stop with --until gate")
        folder = registry_of(config).location.folder
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InputError(f"registry.location: {folder} is a file; a folder, or an address of MLflow, is needed")

    def inputs(self, context: StageContext) -> JsonObject:
        return {"settings": place_in_registry(context.config)}

    def skip(self, context: StageContext) -> str | None:
        undecided = verdict_of(context) == "needs_more_samples"
        return "the gate has not decided: more samples are needed" if undecided else None

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        number = record.outcome.values["version"]
        is_known = any(version.version == number for version in versions_of(config))
        return None if is_known else f"version {number} in the registry"

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        # The same for every attempt of the same work.
        outcomes = {name: context.before[name].outcome.digest for name in self.reads}
        redone = context.iteration.redone.get("registry", 0)
        mark = f"pipeline stage {key_of({'inputs': self.inputs(context), 'outcomes': outcomes, 'redone': redone})[:16]}"
        known = (version for version in versions_of(context.config) if mark in version.note)
        version = next(known, None) or _add(context, mark)
        row = {key: value for key, value in as_row(version).items() if key != "stage"}  # a stage may change later
        durable.write_text(folder / "version.json", json.dumps(row, indent=2, default=str) + "\n")
        return StageOutcome(
            digest=digest([version.name, version.version, self.inputs(context)]),
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


class CanaryStage(Stage):
    name = "canary"
    reads = ("gate", "registry")
    outputs = ("file",)

    def check(self, config: PipelineConfig) -> None:
        with about("canary"):
            CanaryRules(**config.canary.model_dump())

    def inputs(self, context: StageContext) -> JsonObject:
        incumbent = context.iteration.incumbent
        return {
            "settings": context.config.canary.model_dump(),
            "models": {"incumbent": None if incumbent is None else incumbent.identity},
        }

    def skip(self, context: StageContext) -> str | None:
        reasons = {"reject": "the gate rejected it", "needs_more_samples": "the gate has not decided"}
        if reason := reasons.get(verdict_of(context) or ""):
            return reason
        registered = context.before.get("registry")
        if registered is None:
            return None
        # It was archived on purpose. That ends the iteration, so that new traces do not wait for it.
        number, config = registered.outcome.values["version"], context.config
        if _stage_of(number, config) != "archived":
            return None
        again = f"`posttrain registry promote {config.pipeline.name} {number} --to canary --why …` brings it back"
        return f"version {number} was archived since; {again}"

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        number = record.outcome.values["version"]
        if _stage_of(number, config) not in ("canary", "production"):
            return f"version {number} as canary"
        return super().missing(record, config)

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        config, name = context.config, context.config.pipeline.name
        registry = registry_of(config)
        number = int(context.before["registry"].outcome.values["version"])
        version = registry.get(name, number)
        if version.stage in ("candidate", "canary"):
            _refuse_other_production(context, registry.versions(name))
            reasons = "; ".join(context.before["gate"].outcome.values["reasons"])
            why = f"gate of iteration {context.iteration.number}: {reasons or 'passed'}"
            registry.promote(name, number, "canary", why=why[:1000])
        serving = _serving(config, version, context.iteration.incumbent)
        command = _command(serving)
        durable.write_text(folder / SERVE_FILE, yaml.safe_dump({**serving, "command": command}, sort_keys=False))
        script = f'#!/bin/sh\n# Serves {name}; written by `posttrain pipeline run`.\nexec {shlex.join(command)} "$@"\n'
        durable.write_text(folder / SERVE_SCRIPT, script)
        (folder / SERVE_SCRIPT).chmod(0o755)
        return StageOutcome(
            digest=digest([version.reference, serving]),
            headline=_headline(serving, version),
            values={"file": SERVE_FILE, "script": SERVE_SCRIPT, "command": command, "version": number},
            report=SERVE_FILE,
        )


def _stage_of(number: int, config: PipelineConfig) -> str | None:
    return next((version.stage for version in versions_of(config) if version.version == number), None)


def _refuse_other_production(context: StageContext, versions: list[ModelVersion]) -> None:
    """Refuse a candidate that was compared with another model than the one in production."""
    current = next((version.version for version in versions if version.stage == "production"), None)
    incumbent = context.iteration.incumbent
    compared = None if incumbent is None else incumbent.version
    if current != compared:
        now = "nothing" if current is None else f"version {current}"
        then = "nothing" if compared is None else f"version {compared}"
        raise InputError(
            f"canary: {now} is in production now, and {then} was when this iteration began; `pipeline run --from "
            "evaluate` compares with the current one"
        )


def _serving(config: PipelineConfig, version: ModelVersion, incumbent: ModelChoice | None) -> JsonObject:
    """The options of `posttrain serve`, by name."""
    name, location = config.pipeline.name, registry_of(config).location
    shared = {"served_model_name": name, "registry": str(location.folder or location.text)}
    if version.stage == "production":
        return {"model": f"registry:{name}@production", **shared}
    if incumbent is None:
        return {"model": f"registry:{name}@canary", **shared}
    model = f"registry:{name}@production" if incumbent.version is not None else incumbent.text
    rules = {f"canary_{key}": value for key, value in config.canary.model_dump().items() if value is not None}
    return {"model": model, **shared, "canary": f"registry:{name}@canary", **rules}


def _command(serving: JsonObject) -> list[str]:
    words = ["posttrain", "serve", str(serving["model"])]
    for key, value in serving.items():
        if key != "model":
            words += [f"--{key.replace('_', '-')}", str(value)]
    return words


def _headline(serving: JsonObject, version: ModelVersion) -> str:
    if "canary" in serving:
        share = f"{100 * serving['canary_share']:g} % of the traffic"
        where = f"the canary, {share} beside {serving['model']}"
    else:
        where = "in production" if version.stage == "production" else "the canary, and alone: nothing is in production"
    return f"{version.reference} is {where}; start the server with {SERVE_SCRIPT}"
