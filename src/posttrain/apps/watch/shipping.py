"""Pages of pipelines, with their iterations, and of registries, with their versions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from posttrain.apps.ship.pipeline.kpi import KPI_FILE
from posttrain.apps.ship.pipeline.records import (
    ITERATION_FILE,
    ITERATION_FOLDER,
    STAGE_FILE,
    STAGES,
    Iteration,
    StageRecord,
)
from posttrain.apps.ship.registry import Registry
from posttrain.apps.ship.registry.store import DATABASE
from posttrain.apps.watch.places import LocalPlace, Unreadable, read_whole
from posttrain.config.base import parse_as
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject, parse_json

MAX_RECORD_BYTES = 4 * 2**20
MAX_ITERATIONS = 100  # on a page
MAX_DATABASE_BYTES = 128 * 2**20
READ_TRIES = 20

T = TypeVar("T")


def pipeline_row(pipeline_id: str, home: LocalPlace) -> JsonObject:
    """With the problem, if a record of it cannot be read."""
    return _row(pipeline_id, home, *_iterations(home))


def pipeline_page(pipeline_id: str, home: LocalPlace) -> JsonObject:
    iterations, problem = _iterations(home)
    return {
        **_row(pipeline_id, home, iterations, problem),
        "kpi": _kpi(home),
        "iterations": [_iteration(home, one) for one in reversed(iterations[-MAX_ITERATIONS:])],
    }


def _row(pipeline_id: str, home: LocalPlace, iterations: Sequence[Iteration], problem: str) -> JsonObject:
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


def _iterations(home: LocalPlace) -> tuple[list[Iteration], str]:
    """And why there are none."""
    matches = filter(None, map(ITERATION_FOLDER.fullmatch, home.names()))
    folders = [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]
    try:
        found = [_read(home, folder, ITERATION_FILE, Iteration) for folder in folders]
    except InputError as error:
        return [], str(error)
    return [one for one in found if one is not None], ""


def _read(home: LocalPlace, folder: str, name: str, kind: type[T]) -> T | None:
    """A record: a regular file within the pipeline's folder, read as it is opened; None without one."""
    file = f"{folder}/{name}"
    content = read_whole(home, file, MAX_RECORD_BYTES)
    if not content:
        return None
    try:
        row = parse_json(content)
    except ValueError as error:
        raise Unreadable(f"{file}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise Unreadable(f"{file}: not an object")
    return parse_as(kind, {**row, "folder": home.path / folder}, file)


def _kpi(home: LocalPlace) -> list[JsonObject]:
    try:
        rows = parse_json(read_whole(home, KPI_FILE, MAX_RECORD_BYTES))
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _iteration(home: LocalPlace, iteration: Iteration) -> JsonObject:
    stages = []
    for name in STAGES:
        mark, record, problem = iteration.stages.get(name), None, ""
        try:
            if mark is not None and mark.folder is not None and not mark.outdated:
                if not isinstance(mark.folder, str) or mark.folder.startswith("/") or ".." in mark.folder.split("/"):
                    raise Unreadable(f"{STAGE_FILE}: it is not in the folder of the pipeline")
                record = _read(home, mark.folder, STAGE_FILE, StageRecord)
        except InputError as error:
            problem = str(error)
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


def registry_page(registry: str | LocalPlace) -> JsonObject:
    """Every model of a registry with its versions and its history. One in a folder is read from a copy of its database
    in memory: MLflow would open the file again, and write to it."""
    try:
        shown = _copy_of(registry) or Registry(str(registry))
        models = []
        for name in shown.names():
            versions = [
                {
                    **{key: getattr(one, key) for key in ("version", "stage", "at", "by", "note", "num_bytes")},
                    "verdict": one.lineage.verdict,
                    "base_model": one.lineage.base_model,
                    "metrics": dict(one.lineage.metrics),
                }
                for one in shown.versions(name)
            ]
            history = [
                {
                    **{key: getattr(entry.change, key) for key in ("at", "by", "why", "action", "version", "forced")},
                    "refused": entry.refused,
                    "moves": [[move.version, move.before, move.after] for move in entry.moves],
                }
                for entry in shown.history(name)
            ]
            models.append({"name": name, "versions": versions[::-1], "history": history[::-1]})
        return {"models": models}
    except (InputError, ImportError) as error:
        return {"models": [], "problem": str(error)}
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # of a record that somebody else wrote
        return {"models": [], "problem": f"a record in it cannot be read ({type(error).__name__}: {error})"}


def _copy_of(registry: str | LocalPlace) -> Registry | None:
    """None for a registry that is not a file of this machine."""
    if isinstance(registry, str) and "://" in registry:
        return None
    place = registry if isinstance(registry, LocalPlace) else LocalPlace(Path(registry).expanduser().absolute())
    for _ in range(READ_TRIES):
        before, journal = place.stamp(DATABASE), place.stamp(f"{DATABASE}-journal")
        if before is None:
            raise Unreadable(f"{DATABASE}: not found; there is no registry in this folder")
        content = read_whole(place, DATABASE, MAX_DATABASE_BYTES)
        if journal is None and (before, journal) == (place.stamp(DATABASE), place.stamp(f"{DATABASE}-journal")):
            return Registry(place.name, database=content)  # messages have no path
        time.sleep(0.1)
    raise Unreadable(f"{DATABASE}: it is being written; try again")
