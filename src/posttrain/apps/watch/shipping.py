"""Pages of pipelines, with their iterations, and of registries, with their versions."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.ship.pipeline.kpi import KPI_FILE
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject, parse_json


def pipeline_row(pipeline_id: str, home: Path) -> JsonObject:
    iterations = read_iterations(home)
    newest = iterations[-1] if iterations else None
    return {
        "id": pipeline_id,
        "name": home.name,
        "num_iterations": len(iterations),
        "finished": newest.finished if newest else False,
        "running": newest.running if newest else None,
        "begun_at": newest.begun_at if newest else None,
    }


def pipeline_page(pipeline_id: str, home: Path) -> JsonObject:
    return {
        **pipeline_row(pipeline_id, home),
        "kpi": _kpi(home),
        "iterations": [_iteration(one) for one in reversed(read_iterations(home))],
    }


def _kpi(home: Path) -> list[JsonObject]:
    try:
        rows = parse_json((home / KPI_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _iteration(iteration: Iteration) -> JsonObject:
    stages = []
    for name in STAGES:
        mark, record = iteration.stages.get(name), iteration.record(name)
        if record is not None:
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
