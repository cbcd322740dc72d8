"""One bound of one check, decided: it holds, it does not, or nobody can tell yet. Numbers only; no files, no metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.config.gate import Direction, GateSettings
from posttrain.gate.measures import Measurement
from posttrain.gate.statistics import (
    Estimate,
    Range,
    detectable_distance,
    estimate_mean,
    estimate_paired,
    estimate_unpaired,
    needed_problems,
    with_systematic_error,
)

Outcome = Literal["pass", "fail", "undecided", "skipped"]
Side = Literal["above", "below"]  # where the estimate has to be, as seen from the threshold


@dataclass(frozen=True)
class Bound:
    """What a check demands of an estimate."""

    words: str  # "at least 0.3"
    threshold: float
    side: Side
    strict: bool = False  # on the threshold is not enough
    of: str = "the mean"  # what the estimate is of


@dataclass(frozen=True)
class Decision:
    outcome: Outcome
    reason: str
    needed: int | None = None  # problems in all that it would take; None with "undecided": too many to name


@dataclass(frozen=True)
class Comparison:
    """A candidate against production on one metric: the estimate of `candidate - scale * production`."""

    estimate: Estimate
    note: str = ""


def decide(estimate: Estimate, bound: Bound, settings: GateSettings) -> Decision:
    """Against noise: only an interval that is wholly on one side of the threshold decides."""
    if estimate.num_problems < settings.min_problems:
        needed = needed_problems(estimate, bound.threshold, settings.power) or 0
        return Decision(
            "undecided",
            f"{estimate.num_problems} problems are too few to trust an interval (gate.min_problems is "
            f"{settings.min_problems})",
            max(settings.min_problems, needed),
        )
    is_above = bound.side == "above"
    near = estimate.low if is_above else estimate.high  # the bound that has to be on the right side, too
    distance = near - bound.threshold if is_above else bound.threshold - near
    if distance > 0 or (distance == 0 and not bound.strict):
        return Decision("pass", f"{_interval(estimate, bound)} is on the right side of {bound.threshold:.4g}")
    is_lost = estimate.high < bound.threshold if is_above else estimate.low > bound.threshold
    if is_lost or (bound.strict and estimate.low == estimate.high):
        return Decision("fail", f"{_interval(estimate, bound)} is on the wrong side of {bound.threshold:.4g}")
    return _undecided(estimate, bound, settings)


def _undecided(estimate: Estimate, bound: Bound, settings: GateSettings) -> Decision:
    straddles = f"{_interval(estimate, bound)} straddles {bound.threshold:.4g}"
    limit = settings.max_problems
    if limit is not None and (hopeless := _hopeless_within(limit, estimate, bound, settings.power)):
        return Decision("fail", f"{straddles}, and {hopeless}")
    if estimate.systematic and abs(estimate.mean - bound.threshold) <= estimate.systematic:
        return Decision(
            "undecided",
            f"{straddles}; it includes {estimate.systematic:.3g} for speeds that differ by themselves, which no number of "
            "problems makes smaller: allow a larger margin, or lower gate.speed_noise if your machine is quieter",
        )
    needed = needed_problems(estimate, bound.threshold, settings.power)
    if needed is None:
        smallest = detectable_distance(estimate, 10 * estimate.num_problems, settings.power)
        return Decision(
            "undecided",
            f"{straddles}, and the estimate lies on the threshold itself: ten times as many problems "
            f"({10 * estimate.num_problems:,}) would show a distance of {smallest:.3g}",
        )
    more = needed - estimate.num_problems
    return Decision(
        "undecided",
        f"{straddles}; about {needed:,} problems would tell, {more:,} more than there are (with probability "
        f"{settings.power:g}, if the estimate is right)",
        needed,
    )


def _hopeless_within(limit: int, estimate: Estimate, bound: Bound, power: float) -> str:
    """Why the bound cannot be shown to hold with so many problems; empty if it may yet be.

    What was seen of a few problems is mostly noise, so hope ends only where the good end of the interval leaves none.
    """
    if estimate.num_problems >= limit:
        return f"gate.max_problems is {limit:,}"
    best = estimate.high if bound.side == "above" else estimate.low
    needed = needed_problems(replace(estimate, mean=best), bound.threshold, power)
    if needed is not None and needed <= limit:
        return ""
    amount = "more problems than can be named" if needed is None else f"about {needed:,} problems"
    return f"even {best:.4g}, the good end, would take {amount} to show; gate.max_problems is {limit:,}"


def compare(
    candidate: Measurement, production: Measurement, scale: float, confidence: float, noise: float = 0.0
) -> Comparison:
    """Paired where both saw the same problems; `scale` multiplies production's values (margins that are shares).

    `noise`: how far equal evaluations may be apart, as a share, for reasons that have nothing to do with the problems.
    """
    error = noise * max(abs(candidate.mean), abs(scale * production.mean))
    common = [key for key in candidate.values if key in production.values]
    larger = max(len(candidate.values), len(production.values))
    # What one of them has seen is possible for the other.
    ends = [end for side in (candidate, production) for end in side.value_range]
    own, scaled = (min(ends), max(ends)), _scaled((min(ends), max(ends)), scale)
    if 2 * len(common) >= larger:
        differences = [candidate.values[key] - scale * production.values[key] for key in common]
        estimate = estimate_paired(differences, confidence, (own[0] - scaled[1], own[1] - scaled[0]))
        note = "" if len(common) == larger else f"compared on the {len(common)} problems that both have, of {larger}"
        return Comparison(with_systematic_error(estimate, error), note)
    estimate = estimate_unpaired(
        list(candidate.values.values()),
        [scale * value for value in production.values.values()],
        confidence,
        own,
        scaled,
    )
    return Comparison(
        with_systematic_error(estimate, error), f"not paired: only {len(common)} of {larger} problems are the same"
    )


def estimate_alone(candidate: Measurement, confidence: float, noise: float = 0.0) -> Estimate:
    estimate = estimate_mean(list(candidate.values.values()), confidence, candidate.value_range)
    return with_systematic_error(estimate, noise * abs(candidate.mean))


def absolute_bounds(at_least: float | None, at_most: float | None) -> list[Bound]:
    bounds = []
    if at_least is not None:
        bounds.append(Bound(f"at least {at_least:g}", at_least, "above"))
    if at_most is not None:
        bounds.append(Bound(f"at most {at_most:g}", at_most, "below"))
    return bounds


def sign_of_mean(production: Measurement, confidence: float) -> Literal[-1, 1] | None:
    """On which side of 0 the mean is; None if that cannot be told."""
    values = production.values.values()
    if min(values) >= 0:  # as of every rate, length, cost and divergence, also where their mean is close to 0
        return 1
    estimate = estimate_alone(production, confidence)
    return 1 if estimate.low > 0 else -1 if estimate.high < 0 else None


def margin_bound(
    better_by: float | None, worse_by: float | None, relative: bool, better: Direction, sign: Literal[-1, 1] = 1
) -> tuple[Bound, float]:
    """The bound on `candidate - scale * production`, and the scale. One of the two margins is given.

    A margin that is a share moves into the scale: "at most 10 % longer" is `candidate - 1.1 * production <= 0`, which needs no
    division by a mean that is itself uncertain. `sign` is that of production's mean: 10 % more than -1 is -0.9.
    """
    is_gain = better_by is not None
    margin = better_by if better_by is not None else worse_by
    assert margin is not None
    size = f"{100 * margin:g} %" if relative else f"{margin:g}"
    words = f"better than production by {size}" if is_gain else f"worse than production by at most {size}"
    if is_gain and margin == 0:
        words = "better than production"
    signed = margin if is_gain == (better == "higher") else -margin
    side: Side = "above" if better == "higher" else "below"
    if relative:
        scale = 1 + sign * signed
        return Bound(words, 0.0, side, is_gain, f"candidate - {scale:g} × production"), scale
    return Bound(words, signed, side, is_gain, "the difference"), 1.0


def _scaled(value_range: Range, scale: float) -> Range:
    low, high = sorted(scale * end for end in value_range)
    return low, high


def _interval(estimate: Estimate, bound: Bound) -> str:
    return f"{bound.of} {estimate.mean:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]"
