"""traces: look at the labelled traces and write down what is in them. Nothing is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.checkpointing import durable
from posttrain.config.pipeline import PipelineConfig
from posttrain.data.traces.reading import Reading
from posttrain.data.traces.values import PairRules, TraceColumns, TraceFilters
from posttrain.errors import InputError
from posttrain.hashing import FileHashes, digest
from posttrain.pipeline.content import traces_content
from posttrain.pipeline.records import Outcome, StageName, StageRecord, about
from posttrain.pipeline.stage import StageContext, missing_path


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


def current_content(config: PipelineConfig, hashes: FileHashes) -> list[str]:
    try:
        return traces_content(config.traces.path, hashes)
    except InputError as error:
        raise about("traces.path", error) from error


class TracesStage:
    name: StageName = "traces"
    version = 1
    reads: tuple[StageName, ...] = ()
    goes_on = False

    def check(self, config: PipelineConfig) -> None:
        try:
            reading_of(config)
        except InputError as error:
            raise about("traces", error) from error
        try:
            pair_rules_of(config)
        except InputError as error:
            raise about("dataset.pairs", error) from error

    def inputs(self, context: StageContext) -> dict[str, Any]:
        return {"settings": context.config.traces.model_dump(exclude={"path"}), "files": {"traces": list(context.data)}}

    def skip(self, context: StageContext) -> str | None:
        return None

    def missing(self, record: StageRecord, config: PipelineConfig) -> str | None:
        return missing_path(record, "statistics")

    def work(self, context: StageContext, folder: Path) -> Outcome:
        from posttrain.data.traces.statistics import collect_statistics
        from posttrain.reporting.charts import reward_histogram

        found = collect_statistics(reading_of(context.config), pair_rules_of(context.config), None)
        if not found.traces:
            raise InputError(
                f"traces.path: none of the {found.read.rows} rows can be used; `posttrain data inspect` says why"
            )
        durable.write_text(folder / "statistics.json", json.dumps(found.as_dict(), indent=2) + "\n")
        title = f"Rewards of the traces of {context.config.pipeline.name}"
        bars = found.bin_edges, found.bin_counts, found.bin_kinds
        picture = reward_histogram(title, found.headline, *bars, unit="traces")
        durable.write_text(folder / "rewards.svg", picture)
        return Outcome(
            digest=digest(self.inputs(context)),
            headline=f"{found.traces:,} traces of {found.groups:,} prompts, mean reward {found.reward_mean:.3g}; "
            f"{found.with_signal:,} prompts have different rewards",
            values={"traces": found.traces, "mean_reward": found.reward_mean, "statistics": "statistics.json"},
            report="rewards.svg",
        )
