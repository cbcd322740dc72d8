"""Decide one bound of one check: it holds, it fails, or it is undecided. Numbers only; no files, no metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.apps.ship.gate.measures import Measurement
from posttrain.apps.ship.gate.statistics import (
    MeanEstimate,
    detectable_distance,
    estimate_mean,
    estimate_paired,
    estimate_unpaired,
    needed_problems,
    with_systematic_error,
)
from posttrain.config.gate import Direction, GateSettings

Outcome = Literal["pass", "fail", "undecided", "skipped"]
Side = Literal["above", "below"]  # where the estimate has to be, as seen from the threshold


@dataclass(frozen=True)
class Bound:
    """What a check demands of an estimate."""

    demand: str  # "at least 0.3"
    threshold: float
    side: Side
    strict: bool = False  # an estimate on the threshold does not satisfy it
    quantity: str = "the mean"  # what is estimated


@dataclass(frozen=True)
class BoundDecision:
    outcome: Outcome
    reason: str
    needed: int | None = None  # total number of problems for a decision; None with "undecided": more than MAX_ASKED


def decide(estimate: MeanEstimate, bound: Bound, settings: GateSettings) -> BoundDecision:
    """Only an interval that lies entirely on one side of the threshold decides."""
    if estimate.num_problems < settings.min_problems:
        needed = needed_problems(estimate, bound.threshold, settings.power) or 0
        return BoundDecision(
            "undecided",
            f"{estimate.num_problems} problems are too few to trust an interval (gate.min_problems is "
            f"{settings.min_problems})",
            max(settings.min_problems, needed),
        )
    is_above = bound.side == "above"
    near = estimate.low if is_above else estimate.high  # the end of the interval that is closer to failing
    distance = near - bound.threshold if is_above else bound.threshold - near
    if distance > 0 or (distance == 0 and not bound.strict):
        return BoundDecision("pass", f"{_interval(estimate, bound)} is on the right side of {bound.threshold:.4g}")
    has_failed = estimate.high < bound.threshold if is_above else estimate.low > bound.threshold
    if has_failed or (bound.strict and estimate.low == estimate.high):
        return BoundDecision("fail", f"{_interval(estimate, bound)} is on the wrong side of {bound.threshold:.4g}")
    return _undecided(estimate, bound, settings)


def _undecided(estimate: MeanEstimate, bound: Bound, settings: GateSettings) -> BoundDecision:
    straddles = f"{_interval(estimate, bound)} straddles {bound.threshold:.4g}"
    limit = settings.max_problems
    if limit is not None and (obstacle := _out_of_reach(limit, estimate, bound, settings.power)):
        return BoundDecision("fail", f"{straddles}, and {obstacle}")
    if estimate.systematic and abs(estimate.mean - bound.threshold) <= estimate.systematic:
        return BoundDecision(
            "undecided",
            f"{straddles}; it includes {estimate.systematic:.3g} for the noise of speed measurements, which more "
            "problems do not reduce: allow a larger margin, or lower gate.speed_noise if your machine is quieter",
        )
    needed = needed_problems(estimate, bound.threshold, settings.power)
    if needed is None:
        smallest = detectable_distance(estimate, 10 * estimate.num_problems, settings.power)
        return BoundDecision(
            "undecided",
            f"{straddles}, and the estimate is on the threshold: ten times as many problems "
            f"({10 * estimate.num_problems:,}) would detect a distance of {smallest:.3g}",
        )
    more = needed - estimate.num_problems
    return BoundDecision(
        "undecided",
        f"{straddles}; about {needed:,} problems would decide it, {more:,} more than there are (with probability "
        f"{settings.power:g}, if the estimate is right)",
        needed,
    )


def _out_of_reach(limit: int, estimate: MeanEstimate, bound: Bound, power: float) -> str:
    """Why `limit` problems cannot show that the bound holds; empty if they may.

    The estimate from a few problems is mostly noise, so the favourable end of the interval is used in its place.
    """
    if estimate.num_problems >= limit:
        return f"gate.max_problems is {limit:,}"
    best = estimate.high if bound.side == "above" else estimate.low
    needed = needed_problems(replace(estimate, mean=best), bound.threshold, power)
    if needed is not None and needed <= limit:
        return ""
    amount = "more problems than is practical" if needed is None else f"about {needed:,} problems"
    return f"even {best:.4g}, the favourable end, would take {amount} to show; gate.max_problems is {limit:,}"


def compare(
    candidate: Measurement, production: Measurement, scale: float, confidence: float, noise: float = 0.0
) -> tuple[MeanEstimate, str]:
    """Of `candidate - scale * production`, paired where both saw the same problems, and a note on how it was done.

    `noise`: the relative difference that two evaluations of the same model may have, whatever the problems.
    """
    error = noise * max(abs(candidate.mean), abs(scale * production.mean))
    common = [key for key in candidate.values if key in production.values]
    larger = max(len(candidate.values), len(production.values))
    # Values observed on one side are possible on the other.
    ends = [end for side in (candidate, production) for end in side.value_range]
    own = min(ends), max(ends)
    scaled = min(scale * end for end in own), max(scale * end for end in own)
    if 2 * len(common) >= larger:
        differences = [candidate.values[key] - scale * production.values[key] for key in common]
        estimate = estimate_paired(differences, confidence, (own[0] - scaled[1], own[1] - scaled[0]))
        note = "" if len(common) == larger else f"compared on the {len(common)} problems that both have, of {larger}"
        return with_systematic_error(estimate, error), note
    estimate = estimate_unpaired(
        list(candidate.values.values()),
        [scale * value for value in production.values.values()],
        confidence,
        own,
        scaled,
    )
    note = f"not paired: only {len(common)} of {larger} problems are the same"
    return with_systematic_error(estimate, error), note


def estimate_alone(candidate: Measurement, confidence: float, noise: float = 0.0) -> MeanEstimate:
    estimate = estimate_mean(list(candidate.values.values()), confidence, candidate.value_range)
    return with_systematic_error(estimate, noise * abs(candidate.mean))


def absolute_bounds(at_least: float | None, at_most: float | None) -> list[Bound]:
    demands: tuple[tuple[str, float | None, Side], ...] = (
        ("at least", at_least, "above"),
        ("at most", at_most, "below"),
    )
    return [Bound(f"{words} {value:g}", value, side) for words, value, side in demands if value is not None]


def sign_of_mean(production: Measurement, confidence: float) -> Literal[-1, 1] | None:
    """The sign of the mean; None if the interval contains 0."""
    values = production.values.values()
    if min(values) >= 0:  # true of every rate, length, cost and divergence
        return 1
    estimate = estimate_alone(production, confidence)
    return 1 if estimate.low > 0 else -1 if estimate.high < 0 else None


def margin_bound(
    better_by: float | None, worse_by: float | None, relative: bool, better: Direction, sign: Literal[-1, 1] = 1
) -> tuple[Bound, float]:
    """The bound on `candidate - scale * production`, and the scale. One of the two margins is given.

    A relative margin becomes the scale: "at most 10 % longer" is `candidate - 1.1 * production <= 0`. This avoids
    dividing by a mean that is itself uncertain. `sign` is that of production's mean: 10 % more than -1 is -0.9.
    """
    is_gain = better_by is not None
    margin = better_by if better_by is not None else worse_by
    assert margin is not None
    size = f"{100 * margin:g} %" if relative else f"{margin:g}"
    demand = f"better than production by {size}" if is_gain else f"worse than production by at most {size}"
    if is_gain and margin == 0:
        demand = "better than production"
    signed = margin if is_gain == (better == "higher") else -margin
    side: Side = "above" if better == "higher" else "below"
    if relative:
        scale = 1 + sign * signed
        return Bound(demand, 0.0, side, is_gain, f"candidate - {scale:g} × production"), scale
    return Bound(demand, signed, side, is_gain, "the difference"), 1.0


def _interval(estimate: MeanEstimate, bound: Bound) -> str:
    return f"{bound.quantity} {estimate.mean:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]"
