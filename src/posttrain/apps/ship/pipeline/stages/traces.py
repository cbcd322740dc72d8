"""traces: writes statistics of the labelled traces. Nothing is copied."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.apps.ship.pipeline.records import StageOutcome, about
from posttrain.apps.ship.pipeline.stage import StageContext
from posttrain.config.pipeline import PipelineConfig
from posttrain.data.traces.reading import Reading
from posttrain.data.traces.values import PairRules, TraceColumns, TraceFilters
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.digests import FileHashes, digest
from posttrain.files.json_files import JsonObject


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
        return _traces_content(config.traces.path, hashes)
    except InputError as error:
        raise about("traces.path", error) from error


def _traces_content(path: str | Sequence[str], hashes: FileHashes) -> list[str]:
    """The content of each file of traces, in the order in which they are read. Names do not count.

    Files behind a URL are not read for this: their store provides a checksum (an ETag, or size and time).
    """
    from posttrain.data.traces.files import locate

    contents = []
    for file in locate(path):
        protocol = file.filesystem.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        if "file" in names or "local" in names:
            contents.append(hashes.of(Path(file.location)))
        else:
            contents.append(f"{file.shown}:{file.size}:{file.filesystem.checksum(file.location)}")
    return contents


def check(config: PipelineConfig) -> None:
    try:
        reading_of(config)
    except InputError as error:
        raise about("traces", error) from error
    try:
        pair_rules_of(config)
    except InputError as error:
        raise about("dataset.pairs", error) from error


def inputs(context: StageContext) -> JsonObject:
    return {"settings": context.config.traces.model_dump(exclude={"path"}), "files": {"traces": list(context.data)}}


def work(context: StageContext, folder: Path) -> StageOutcome:
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
    picture = reward_histogram(title, found.headline, *bars, unit="traces")
    durable.write_text(folder / "rewards.svg", picture)
    return StageOutcome(
        digest=digest(inputs(context)),
        headline=f"{found.traces:,} traces of {found.groups:,} prompts, mean reward {found.reward_mean:.3g}; "
        f"{found.with_signal:,} prompts have different rewards",
        values={"traces": found.traces, "mean_reward": found.reward_mean, "statistics": "statistics.json"},
        report="rewards.svg",
    )
