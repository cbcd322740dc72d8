"""traces: statistics of the labelled traces; nothing is copied. dataset: the traces as training data: preference pairs,
groups of recorded answers, or prompts with references.

The dataset is the snapshot of an iteration: traces that are added later do not change what it trains on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from posttrain.apps.ship.pipeline.records import StageOutcome
from posttrain.apps.ship.pipeline.stage import Stage, StageContext, about
from posttrain.config.pipeline import PipelineConfig
from posttrain.data.errors import DataError
from posttrain.data.traces.reading import Reading
from posttrain.data.traces.report import PairReport, ReadReport
from posttrain.data.traces.values import PairRules, TraceColumns, TraceFilters, TraceGroup
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import FileHashes, digest
from posttrain.files.json_files import JsonObject

Row = JsonObject


def reading_of(config: PipelineConfig) -> Reading:
    traces = config.traces
    return Reading(
        traces.path if isinstance(traces.path, str) else tuple(traces.path),
        TraceColumns(**traces.columns.model_dump()),
        TraceFilters(**traces.filters.model_dump()),
        traces.broken_files,
    )


def pair_rules_of(config: PipelineConfig) -> PairRules:
    return PairRules(**config.dataset.pairs.model_dump())


@about("traces.path")
def current_content(config: PipelineConfig, hashes: FileHashes) -> list[str]:
    """The content of each file of traces, in the order in which they are read. Names do not count.

    Files behind a URL are not read for this: their store provides a checksum (an ETag, or size and time).
    """
    from posttrain.data.traces.files import locate

    contents = []
    for file in locate(config.traces.path):
        protocol = file.filesystem.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        if "file" in names or "local" in names:
            contents.append(hashes.of(Path(file.location)))
        else:
            contents.append(f"{file.shown}:{file.size}:{file.filesystem.checksum(file.location)}")
    return contents


class Traces(Stage):
    name = "traces"
    outputs = ("statistics",)

    def check(self, config: PipelineConfig) -> None:
        with about("traces"):
            reading_of(config)
        with about("dataset.pairs"):
            pair_rules_of(config)

    def inputs(self, context: StageContext) -> JsonObject:
        return {"settings": context.config.traces.model_dump(exclude={"path"}), "files": {"traces": list(context.data)}}

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        from posttrain.data.traces.statistics import collect_statistics
        from posttrain.reporting.charts import reward_histogram

        found = collect_statistics(reading_of(context.config), pair_rules_of(context.config), None)
        if not found.traces:
            raise InputError(
                f"traces.path: none of the {found.read.rows} rows can be used; `posttrain data inspect` shows why"
            )
        durable.write_text(folder / "statistics.json", json.dumps(found.as_dict(), indent=2) + "\n")
        title = f"Rewards of the traces of {context.config.pipeline.name}"
        bars = found.bin_edges, found.bin_counts, found.bin_kinds
        durable.write_text(folder / "rewards.svg", reward_histogram(title, found.headline, *bars, unit="traces"))
        return StageOutcome(
            digest=digest(self.inputs(context)),
            headline=f"{found.traces:,} traces of {found.groups:,} prompts, mean reward {found.reward_mean:.3g}; "
            f"{found.with_signal:,} prompts have different rewards",
            values={"traces": found.traces, "mean_reward": found.reward_mean, "statistics": "statistics.json"},
            report="rewards.svg",
        )


class Dataset(Stage):
    name = "dataset"
    reads = ("traces",)
    outputs = ("file",)

    def inputs(self, context: StageContext) -> JsonObject:
        config = context.config
        rules = config.dataset.pairs.model_dump() if config.dataset_kind == "pairs" else {}
        alone = {"references": "not needed"} if config.train.algorithm == "distill" else {}
        return {"settings": {"kind": config.dataset_kind, **rules, **alone}}

    def work(self, context: StageContext, folder: Path) -> StageOutcome:
        kind, reading = context.config.dataset_kind, reading_of(context.config)
        file = folder / f"{kind}.jsonl"
        read, facts = ReadReport(), {}
        if kind == "pairs":
            from posttrain.data.traces.pair_files import write_pairs

            counts = PairReport()
            lines = write_pairs(reading, file, pair_rules_of(context.config), "trl", read, counts)
            facts = counts.as_dict()
        else:
            from posttrain.data.traces import iter_trace_groups

            groups = iter_trace_groups(
                reading.path, reading.columns, reading.filters, broken_files=reading.broken_files, report=read
            )
            left_out = Counter[str]()
            are_needed = context.config.train.algorithm != "distill"
            rows = _recorded(groups) if kind == "groups" else _prompts(groups, left_out, are_needed)
            lines = _write_rows(file, rows)
            facts = {"left_out": left_out}
            if not lines:
                why = "; ".join(f"{count} prompts: {reason}" for reason, count in left_out.items())
                raise DataError(f"dataset.kind {kind}: no row could be made of the traces{f' ({why})' if why else ''}")
        if current_content(context.config, context.hashes) != list(context.data):
            raise DataError(
                "traces.path: the files changed while they were read; run again when no process writes to them"
            )
        report = {"kind": kind, "rows": lines, "read": read.as_dict(), **facts}
        durable.write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
        return StageOutcome(
            digest=digest([kind, context.hashes.of(file)]),
            headline=f"{lines:,} {'rows of recorded answers' if kind == 'groups' else kind}",
            values={"kind": kind, "file": file.name, "rows": lines},
            report="report.json",
        )


def _recorded(groups: Iterator[TraceGroup]) -> Iterator[Row]:
    """One row per trace, group by group, with the default column names."""
    for group in groups:
        for trace in group.traces:
            row: Row = {"input": group.prompt, "output": trace.response, "final_reward": trace.reward}
            optional = {"group_id": group.group_id, "trace_id": trace.trace_id, "reference": trace.reference}
            yield row | {name: value for name, value in optional.items() if value is not None}


def _prompts(groups: Iterator[TraceGroup], left_out: Counter[str], references_are_needed: bool) -> Iterator[Row]:
    """Each prompt once, with the answer that is expected; the answers that were given are not used."""
    seen: set[str] = set()
    for group in groups:
        prompt = group.prompt
        name = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
        if name in seen:
            continue
        seen.add(name)
        references = {trace.reference for trace in group.traces} - {None, ""}
        if len(references) == 1:
            yield {"input": group.prompt, "output": references.pop()}
        elif not references_are_needed:
            yield {"input": group.prompt}
        else:
            left_out["several reference answers" if references else "no reference answer"] += 1


def _write_rows(file: Path, rows: Iterator[Row]) -> int:
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    durable.sync_file(file)
    return count
