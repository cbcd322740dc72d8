"""The charts that every view of a run shows: the report and the dashboard. Thresholds are those of the doctor.

`assets/chart.js` draws them; `chart_specs.yaml` says what they show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from posttrain.files.json_files import JsonObject
from posttrain.reporting.doctor import common_rules, policy_rules, sampling_rules
from posttrain.reporting.doctor.history import START
from posttrain.reporting.presentation import Band, ChartSpec, Headline
from posttrain.reporting.run_data import Series

MAX_CURVES = 8  # as many as there are colours
MAX_POINTS = 400

_THRESHOLDS = {**vars(common_rules), **vars(policy_rules), **vars(sampling_rules)}


def _spec(row: JsonObject) -> ChartSpec:
    bands = [{name: _THRESHOLDS.get(value, value) for name, value in band.items()} for band in row.pop("bands", ())]
    return ChartSpec(**{**row, "curves": tuple(map(tuple, row["curves"]))}, bands=tuple(Band(**band) for band in bands))


CHARTS = tuple(map(_spec, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))))


def charts_of(headline: Headline, keys: Collection[str]) -> list[ChartSpec]:
    """The charts for a run that logged `keys`, the most important one first."""
    parts = tuple((key, key.removeprefix("train/reward/")) for key in keys if key.startswith("train/reward/"))
    reward_parts = ChartSpec("Reward parts", parts[:MAX_CURVES], "Mean of each named part of the reward.")
    charts = [headline.chart, reward_parts, *(chart for chart in CHARTS if chart.curves != headline.chart.curves)]
    return [chart for chart in charts if not set(keys).isdisjoint(chart.keys)]


def bands_at_start(chart: ChartSpec, values: Sequence[float | None]) -> list[Band]:
    """The bands of a chart with absolute thresholds. The start is the median of the first values, as for the doctor."""
    first = [value for value in values if value is not None][:START]
    start = statistics.median(first) if len(first) == START else None
    return [absolute for band in chart.bands if (absolute := band.at(start)) is not None]


def chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    wide: bool = False,
    bands: Sequence[Band] = (),
    marks: Sequence[JsonObject] = (),
    max_points: int = MAX_POINTS,
) -> JsonObject:
    """A chart as `assets/chart.js` takes it, with the latest value of each curve. Series without a finite value are
    left out.

    `marks` are steps at which something was found: step, kind (note, warning or error) and text.
    """
    curves = [
        {
            "name": one.name,
            "colour": colour,
            "smooth": one.smooth,
            "last": one.last,
            "data": points_of(np.array(one.steps), np.array(one.values, dtype=float), max_points),
        }
        for colour, one in enumerate(one for one in series if not one.is_empty)
    ]
    return {
        "title": title,
        "note": note,
        "wide": wide,
        "unit": "",
        "bands": [asdict(band) for band in bands],
        "marks": list(marks),
        "curves": curves,
    }


def points_of(steps: np.ndarray, values: np.ndarray, max_points: int) -> dict[str, list[float | None]]:
    """At most `max_points` buckets of neighbouring steps, nearly equal in size: the last step of each, mean, and,
    where a bucket has several steps, lowest and highest value. What is not finite is a gap: None."""
    if not len(steps):
        return {"steps": [], "mean": []}
    count = min(len(steps), max_points)
    starts = len(steps) * np.arange(count) // count
    ends = np.append(starts[1:], len(steps))
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        total, number = (np.add.reduceat(part, starts) for part in (np.where(finite, values, 0.0), finite.astype(int)))
        points = {"steps": steps[ends - 1].tolist(), "mean": _short(total / number)}
    if count < len(steps):
        points["low"] = _short(np.minimum.reduceat(np.where(finite, values, math.inf), starts))
        points["high"] = _short(np.maximum.reduceat(np.where(finite, values, -math.inf), starts))
    return points


def _short(values: np.ndarray) -> list[float | None]:
    """Six significant digits: enough for a chart."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
