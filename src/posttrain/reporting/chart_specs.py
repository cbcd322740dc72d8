"""The charts that every view of a run shows: the report and the dashboard. Thresholds are those of the doctor.

`assets/chart.js` draws them; here is what they show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict

import numpy as np

from posttrain.files.json_files import JsonObject
from posttrain.reporting.doctor.common_rules import SPIKE_ERROR, SPIKE_WARNING
from posttrain.reporting.doctor.history import START
from posttrain.reporting.doctor.policy_rules import (
    ENTROPY_ERROR,
    ENTROPY_WARNING,
    KL_ERROR,
    KL_WARNING,
    SIGNAL_ERROR,
    SIGNAL_WARNING,
    TRUNCATION_ERROR,
    TRUNCATION_WARNING,
)
from posttrain.reporting.doctor.sampling_rules import CLIP_WARNING, MISMATCH_ERROR, MISMATCH_WARNING
from posttrain.reporting.presentation import Band, ChartSpec, Headline
from posttrain.reporting.run_data import Series

MAX_CURVES = 8  # as many as there are colours
MAX_POINTS = 400

CHARTS = (
    ChartSpec(
        "Rewards of the pairs",
        (("train/rewards_chosen_mean", "chosen"), ("train/rewards_rejected_mean", "rejected")),
        "The log-probability gained over the reference, not multiplied by beta, or a reward model's score. "
        "The gap should open.",
    ),
    ChartSpec(
        "KL to the reference",
        (("train/kl_penalty", "KL"), ("train/kl_to_start", "estimate, not in the loss")),
        "Per token. 0.01 to 0.1 is usual; above 0.5 the policy is diverging.",
        (Band("warning", above=KL_WARNING), Band("error", above=KL_ERROR)),
    ),
    ChartSpec(
        "Mean generation length",
        (("train/mean_generation_length", "training"), ("validation/mean_generation_length", "validation")),
        "Response tokens per sample.",
    ),
    ChartSpec(
        "Groups with signal",
        (("train/groups_with_signal", "share of groups"),),
        "Only groups with different rewards give a gradient.",
        (Band("warning", below=SIGNAL_WARNING), Band("error", below=SIGNAL_ERROR)),
    ),
    ChartSpec(
        "Truncated answers",
        (("train/truncation_rate", "share of answers"),),
        "A truncated answer ended at the length limit.",
        (Band("warning", above=TRUNCATION_WARNING), Band("error", above=TRUNCATION_ERROR)),
    ),
    ChartSpec(
        "Gradient norm",
        (("train/grad_norm", "norm"),),
        "Before clipping. Spikes above 10 are a sign of instability.",
        (Band("warning", above=SPIKE_WARNING), Band("error", above=SPIKE_ERROR)),
    ),
    ChartSpec("Loss", (("train/loss", "training"), ("validation/loss", "validation")), ""),
    ChartSpec(
        "Approximate entropy",
        (("train/approx_entropy", "entropy"),),
        "Per token. Near zero there is no exploration.",
        (
            Band("warning", below=ENTROPY_WARNING, of_start=True),
            Band("error", below=ENTROPY_ERROR, of_start=True),
        ),
    ),
    ChartSpec(
        "Clipped tokens",
        (("train/clip_fraction", "clipped tokens"),),
        "Share of the tokens. Above 0.3 the updates of a step go further than the clip allows.",
        (Band("warning", above=CLIP_WARNING),),
    ),
    ChartSpec(
        "Sampler against trainer",
        (("train/token_mult_prob_error", "mean exp |difference|"),),
        "1 is perfect agreement of sampling and training log-probabilities.",
        (Band("warning", above=MISMATCH_WARNING), Band("error", above=MISMATCH_ERROR)),
    ),
    ChartSpec(
        "Throughput",
        (
            ("performance/tokens_per_sec_per_gpu", "end to end"),
            ("performance/generation_tokens_per_sec_per_gpu", "generation"),
            ("performance/policy_training_tokens_per_sec_per_gpu", "training"),
        ),
        "Tokens of full sequences per second and {device}.",
    ),
    ChartSpec("Learning rate", (("train/lr", "lr"),), ""),
)


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
