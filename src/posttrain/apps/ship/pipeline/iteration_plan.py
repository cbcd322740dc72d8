"""Decides which stages have to run, and why. A finished stage with the same key, a hash of its inputs, is reused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.apps.ship.pipeline.records import (
    StageName,
    StageRecord,
    find_finished,
    key_of,
    read_iterations,
    stage_folder,
)
from posttrain.apps.ship.pipeline.stage import Stage, StageContext
from posttrain.files.json_files import JsonMapping

Action = Literal["run", "reuse", "skip", "depends"]
_MAX_CHANGES = 3
# What is said of a difference, by the part of the inputs that it is in.
_PARTS = {
    "settings": "{name} changed: {old} → {new}",
    "files": "{name} changed",
    "models": "another {name} model",
    "outcomes": "{name} has a new result",
}


@dataclass(frozen=True)
class StageDecision:
    stage: StageName
    action: Action  # depends: on the outcome of an earlier stage that has to run
    why: str
    key: str = ""
    inputs: JsonMapping | None = None
    record: StageRecord | None = None  # of a stage that is reused


def decide(stage: Stage, context: StageContext) -> StageDecision:
    if reason := stage.skip(context):
        return StageDecision(stage.name, "skip", reason)
    absent = [name for name in stage.reads if name not in context.before]
    if absent:
        return StageDecision(stage.name, "depends", f"on the outcome of {', '.join(absent)}")
    inputs = stage.inputs(context) | {"stage": stage.name, "code": stage.version}
    inputs["outcomes"] = {name: context.before[name].outcome.digest for name in stage.reads}
    if again := context.iteration.redone.get(stage.name, 0):
        inputs["redone"] = again
    key = key_of(inputs)
    record = find_finished(context.home, stage.name, key) or _of_another_version(stage, context, inputs)
    if record is not None:
        gone = stage.missing(record, context.config)
        if gone is None:
            return StageDecision(stage.name, "reuse", "nothing that it reads has changed", key, inputs, record)
        return StageDecision(stage.name, "run", f"{gone} is missing", key, inputs)
    return StageDecision(stage.name, "run", _why(stage, context, inputs, key), key, inputs)


def _of_another_version(stage: Stage, context: StageContext, inputs: JsonMapping) -> StageRecord | None:
    """The newest finished stage with equal inputs whose settings were recorded by a version with other keys."""
    for iteration in reversed(read_iterations(context.home)):
        record = iteration.record(stage.name)
        if record is None:
            continue
        old, new = dict(record.inputs), dict(inputs)
        old_settings, new_settings = old.pop("settings", {}), new.pop("settings", {})
        if old == new and stage.same_settings(context.config, old_settings, new_settings):
            return record
    return None


def plan(stages: Sequence[Stage], context: StageContext) -> Iterator[StageDecision]:
    """What a run would do with each stage, as far as it can be determined without running."""
    for stage in stages:
        decision = decide(stage, context)
        if decision.record is not None:
            context = replace(context, before={**context.before, stage.name: decision.record})
        yield decision


def _why(stage: Stage, context: StageContext, inputs: JsonMapping, key: str) -> str:
    iteration = context.iteration
    if (iteration.folder / stage_folder(stage.name, key)).exists():
        return f"it was interrupted; it {'resumes' if stage.resumes else 'starts again'}"
    candidates = (iteration, *reversed(read_iterations(context.home)))
    records = (one.record(stage.name, outdated=True) for one in candidates)
    earlier = next((record for record in records if record is not None), None)
    if earlier is None:
        return "it has not run yet"
    changes = list(_changes(earlier.inputs, inputs))
    return "; ".join(changes[:_MAX_CHANGES]) + ("; …" if len(changes) > _MAX_CHANGES else "")


def _changes(before: JsonMapping, now: JsonMapping) -> Iterator[str]:
    if before.get("redone", 0) < now.get("redone", 0):
        yield "asked for with --from"
    if before.get("code") != now.get("code"):
        yield f"the stage's code is version {now.get('code')}, not {before.get('code')}"
    for part, words in _PARTS.items():
        old, new = before.get(part) or {}, now.get(part) or {}
        for name in dict.fromkeys([*new, *old]):
            if old.get(name) != new.get(name):
                shown = words.format(name=name, old=_short(old.get(name)), new=_short(new.get(name)))
                yield "the traces changed" if (part, name) == ("files", "traces") else shown


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
