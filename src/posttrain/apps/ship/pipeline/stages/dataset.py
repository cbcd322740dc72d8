"""dataset: writes the traces as training data: preference pairs, groups of recorded answers, or prompts with
references.

The file is the snapshot of an iteration: traces that are added later do not change what it trains on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from posttrain.apps.ship.pipeline.records import StageOutcome
from posttrain.apps.ship.pipeline.stage import StageContext
from posttrain.apps.ship.pipeline.stages.traces import current_content, pair_rules_of, reading_of
from posttrain.config.pipeline import PipelineConfig
from posttrain.data.errors import DataError
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import TraceGroup
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonObject

Row = JsonObject
NO_REFERENCE = "no reference answer"
SEVERAL_REFERENCES = "several reference answers"


def inputs(context: StageContext) -> JsonObject:
    config = context.config
    rules = config.dataset.pairs.model_dump() if config.dataset_kind == "pairs" else {}
    return {"settings": {"kind": config.dataset_kind, **rules}}


def work(context: StageContext, folder: Path) -> StageOutcome:
    kind = context.config.dataset_kind
    file = folder / f"{kind}.jsonl"
    read, facts = ReadReport(), {}
    if kind == "pairs":
        from posttrain.data.traces.pair_files import write_pairs

        counts = PairReport()
        lines = write_pairs(reading_of(context.config), file, pair_rules_of(context.config), "trl", read, counts)
        facts = counts.as_dict()
    else:
        rows, left_out = _rows(context.config, read)
        lines = _write_rows(file, rows)
        facts = {"left_out": left_out}
        if not lines:
            why = "; ".join(f"{count} prompts: {reason}" for reason, count in left_out.items())
            raise DataError(f"dataset.kind {kind}: no row could be made of the traces{f' ({why})' if why else ''}")
    if current_content(context.config, context.hashes) != list(context.data):
        raise DataError("traces.path: the files changed while they were read; run again when no process writes to them")
    report = {"kind": kind, "rows": lines, "read": read.as_dict(), **facts}
    durable.write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
    return StageOutcome(
        digest=digest([kind, context.hashes.of(file)]),
        headline=f"{lines:,} {'rows of recorded answers' if kind == 'groups' else kind}",
        values={"kind": kind, "file": file.name, "rows": lines},
        report="report.json",
    )


def _rows(config: PipelineConfig, read: ReadReport) -> tuple[Iterator[Row], Counter[str]]:
    from posttrain.data.traces import iter_trace_groups

    reading, left_out = reading_of(config), Counter[str]()
    groups = iter_trace_groups(
        reading.path, reading.columns, reading.filters, broken_files=reading.broken_files, report=read
    )
    rows = _recorded(groups) if config.dataset_kind == "groups" else _prompts(groups, left_out)
    return rows, left_out


def _recorded(groups: Iterator[TraceGroup]) -> Iterator[Row]:
    """One row per trace, group by group, with the default column names."""
    for group in groups:
        for trace in group.traces:
            row: Row = {"input": group.prompt, "output": trace.response, "final_reward": trace.reward}
            optional = {"group_id": group.group_id, "trace_id": trace.trace_id, "reference": trace.reference}
            yield row | {name: value for name, value in optional.items() if value is not None}


def _prompts(groups: Iterator[TraceGroup], left_out: Counter[str]) -> Iterator[Row]:
    """Each prompt once, with the answer that is expected; the answers that were given are not used."""
    seen: set[str] = set()
    for group in groups:
        prompt = group.prompt
        name = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
        references = {trace.reference for trace in group.traces} - {None, ""}
        if name in seen:
            continue
        seen.add(name)
        if len(references) != 1:
            left_out[SEVERAL_REFERENCES if references else NO_REFERENCE] += 1
            continue
        yield {"input": group.prompt, "output": references.pop()}


def _write_rows(file: Path, rows: Iterator[Row]) -> int:
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
        stream.flush()
        os.fsync(stream.fileno())
    return count
