"""A run of another system, translated: a key map for its metrics and one for the settings that fixes name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.files.json_files import JsonMapping, JsonObject, parse_json

Keys = Mapping[str, str]  # their name of a metric to ours


@dataclass(frozen=True)
class ForeignRun:
    system: str
    kind: str  # grpo, dpo, rm or sft
    rows: Sequence[JsonObject]  # as in our metrics.jsonl
    names: Mapping[str, str] | None  # our name of a setting to theirs; None: the names are the same
    settings: Mapping[str, object] = field(default_factory=dict)  # by our names, as far as they are known
    groups: Callable[[int], list[JsonObject]] = lambda step: []  # the answers of a step, as in our rollouts


def kind_of(rows: Iterable[JsonMapping], **metrics: str) -> str:
    """The first kind whose metric was logged; supervised fine-tuning has none of its own."""
    logged = {key for row in rows for key in row}
    return next((kind for kind, metric in metrics.items() if metric in logged), "sft")


def translated(rows: Iterable[JsonMapping], keys: Keys) -> list[JsonObject]:
    """One row per step with the metrics that have a name of ours; the step of each row is in `step`."""
    merged: dict[int, JsonObject] = {}
    for row in rows:
        step = int(row["step"])
        for key, value in row.items():
            if key in keys and (value is None or isinstance(value, int | float)):
                merged.setdefault(step, {"step": step})[keys[key]] = value
    return [merged[step] for step in sorted(merged)]


def grouped(answers: Iterable[tuple[str, JsonObject]]) -> list[JsonObject]:
    """Answers with their prompts, as groups: those of equal prompts that follow each other."""
    groups: list[JsonObject] = []
    for prompt, answer in answers:
        if not groups or groups[-1]["prompt"] != prompt:
            groups.append({"id": f"prompt {len(groups) + 1}", "prompt": prompt, "completions": []})
        groups[-1]["completions"].append(answer)
    return groups


def parsed_line(line: bytes) -> JsonObject:
    """The object on a line; empty if the line is torn, as the last one of a run that is being written may be."""
    try:
        row = parse_json(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
