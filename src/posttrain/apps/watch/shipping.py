"""Pages of pipelines, with their iterations, and of registries, with their versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.apps.ship.pipeline.kpi import KPI_FILE
from posttrain.apps.ship.pipeline.records import (
    ITERATION_FILE,
    ITERATION_FOLDER,
    STAGE_FILE,
    STAGES,
    Iteration,
    read_iterations,
)
from posttrain.apps.watch.places import LocalPlace, Unreadable, read_whole
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject, parse_json

MAX_RECORD_BYTES = 4 * 2**20
MAX_ITERATIONS = 100  # on a page


def pipeline_row(pipeline_id: str, home: Path) -> JsonObject:
    """With the problem, if a record of it cannot be read."""
    return _row(pipeline_id, home, *_iterations(home))


def pipeline_page(pipeline_id: str, home: Path) -> JsonObject:
    iterations, problem = _iterations(home)
    return {
        **_row(pipeline_id, home, iterations, problem),
        "kpi": _kpi(home),
        "iterations": [_iteration(one) for one in reversed(iterations[-MAX_ITERATIONS:])],
    }


def _row(pipeline_id: str, home: Path, iterations: Sequence[Iteration], problem: str) -> JsonObject:
    newest = iterations[-1] if iterations else None
    return {
        "id": pipeline_id,
        "name": home.name,
        "num_iterations": len(iterations),
        "finished": newest.finished if newest else False,
        "running": newest.running if newest else None,
        "begun_at": newest.begun_at if newest else None,
        "problem": problem,
    }


def _iterations(home: Path) -> tuple[list[Iteration], str]:
    """And why there are none."""
    place = LocalPlace(home)
    try:
        for name in filter(ITERATION_FOLDER.fullmatch, place.names()):
            read_whole(place, f"{name}/{ITERATION_FILE}", MAX_RECORD_BYTES)  # regular files, and no links
        return read_iterations(home), ""
    except InputError as error:
        return [], str(error).replace(str(home), home.name)


def _kpi(home: Path) -> list[JsonObject]:
    try:
        rows = parse_json(read_whole(LocalPlace(home), KPI_FILE, MAX_RECORD_BYTES))
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _iteration(iteration: Iteration) -> JsonObject:
    stages = []
    for name in STAGES:
        mark, record, problem = iteration.stages.get(name), None, ""
        try:
            if mark is not None and mark.folder is not None:
                _refuse_outside(iteration.home, mark.folder)
                record = iteration.record(name)
        except InputError as error:
            problem = str(error).replace(str(iteration.home), iteration.home.name)
        if problem:
            row: JsonObject = {"state": "unreadable", "headline": problem}
        elif record is not None:
            state = "reused" if mark is not None and mark.reused else "done"
            row = {"state": state, "seconds": record.seconds, "headline": record.outcome.headline}
        elif mark is not None and mark.skipped and not mark.outdated:
            row = {"state": "skipped", "headline": mark.skipped}
        else:
            row = {"state": "running" if iteration.running == name else "waiting", "headline": ""}
        stages.append({"name": name, **row})
    return {
        "number": iteration.number,
        "begun_at": iteration.begun_at,
        "finished": iteration.finished,
        "start": iteration.start.text,
        "start_why": iteration.start_why,
        "incumbent": iteration.incumbent.text if iteration.incumbent else None,
        "stages": stages,
    }


def _refuse_outside(home: Path, folder: object) -> None:
    """Unreadable for the record of a stage that is not a file within the pipeline's folder."""
    if not isinstance(folder, str) or folder.startswith("/") or ".." in folder.split("/"):
        raise Unreadable(f"{STAGE_FILE}: it is not in the folder of the pipeline")
    read_whole(LocalPlace(home), f"{folder}/{STAGE_FILE}", MAX_RECORD_BYTES)


def registry_page(location: str) -> JsonObject:
    """Every model of a registry with its versions and its history. Importing MLflow takes seconds, the first time."""
    from posttrain.apps.ship.registry import Registry

    try:
        registry = Registry(location)
        models = []
        for name in registry.names():
            versions = [
                {
                    "version": one.version,
                    "stage": one.stage,
                    "at": one.at,
                    "by": one.by,
                    "note": one.note,
                    "verdict": one.lineage.verdict,
                    "base_model": one.lineage.base_model,
                    "metrics": dict(one.lineage.metrics),
                    "num_bytes": one.num_bytes,
                }
                for one in registry.versions(name)
            ]
            history = [
                {
                    "at": entry.change.at,
                    "by": entry.change.by,
                    "why": entry.change.why,
                    "action": entry.change.action,
                    "version": entry.change.version,
                    "forced": entry.change.forced,
                    "refused": entry.refused,
                    "moves": [[move.version, move.before, move.after] for move in entry.moves],
                }
                for entry in registry.history(name)
            ]
            models.append({"name": name, "versions": versions[::-1], "history": history[::-1]})
        return {"models": models}
    except (InputError, ImportError) as error:
        return {"models": [], "problem": str(error)}
