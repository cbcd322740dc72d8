"""Bounds and sample sizes against recorded numbers and slow references: counting, simulation."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the gate needs the extra `gate`")

from scipy.special import ndtri, stdtrit

from posttrain.apps.ship.gate.statistics import (
    MeanEstimate,
    detectable_distance,
    estimate_mean,
    estimate_paired,
    estimate_unpaired,
    needed_problems,
)
from posttrain.errors import InputError

CONFIDENCE = 0.95
RATE = (0.0, 1.0)
DIFFERENCE = (-1.0, 1.0)


def drawn(kind: str | int, count: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    draw: dict[str | int, Callable[[], np.ndarray]] = {
        "rates": lambda: (rng.random(count) < 0.3).astype(float),
        "shares": lambda: rng.binomial(4, 0.6, count) / 4,
        "lengths": lambda: rng.lognormal(4, 0.8, count),
        "equal": lambda: np.full(count, 0.5),
    }
    return draw[kind]().tolist()


def test_numbers_are_those_of_the_incomplete_beta_function_that_scipy_has_replaced() -> None:
    """`recorded_estimates.jsonl` was written with the gate's own quantiles, which were found by bisection."""
    file = Path(__file__).with_name("recorded_estimates.jsonl")
    for row in map(json.loads, file.read_text().splitlines()):
        kind, count, confidence = row["kind"], row["num_problems"], row["confidence"]
        if row["method"] == "exact":  # `kind` is the number of hits
            found = estimate_mean([1.0] * kind + [0.0] * (count - kind), confidence, RATE)
        else:
            left, right = drawn(kind, count, count), drawn(kind, max(2, count // 2), count + 1)
            top = max(left + right) if kind == "lengths" else 1.0
            differences = [a - b for a, b in zip(left, drawn(kind, count, count + 1), strict=True)]
            if row["method"] == "one":
                found = estimate_mean(left, confidence, (0.0, top))
            elif row["method"] == "paired":
                found = estimate_paired(differences, confidence, (-top, top))
            else:
                found = estimate_unpaired(left, right, confidence, (0.0, top), (0.0, top))
        for name in ("mean", "low", "high", "deviation", "imagined"):
            assert getattr(found, name) == pytest.approx(row[name], rel=1e-12, abs=1e-13), (row, name)
        thresholds = (found.mean - 0.02, found.mean + 0.1, 0.97)
        assert [needed_problems(found, threshold, 0.8) for threshold in thresholds] == row["needed"], row
        assert detectable_distance(found, 500, 0.8) == pytest.approx(row["detectable"], rel=1e-12)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    monkeypatch.delattr("scipy.special")
    with pytest.raises(InputError, match=r"posttrain\[gate\]"):
        estimate_mean([0.0, 1.0], CONFIDENCE, RATE)


def binomial_tail(total: int, probability: float, at_least: int) -> float:
    terms = (
        math.comb(total, k) * probability**k * (1 - probability) ** (total - k) for k in range(at_least, total + 1)
    )
    return math.fsum(terms)


@pytest.mark.parametrize(("hits", "total"), [(0, 30), (3, 40), (20, 40), (39, 40), (30, 30)])
def test_bounds_of_a_proportion_have_binomial_tails_of_five_percent(hits: int, total: int) -> None:
    found = estimate_mean([1.0] * hits + [0.0] * (total - hits), CONFIDENCE, RATE)
    assert found.method == "exact binomial"
    assert found.mean == hits / total
    if hits:
        assert binomial_tail(total, found.low, hits) == pytest.approx(0.05)
    if hits < total:
        assert 1 - binomial_tail(total, found.high, hits + 1) == pytest.approx(0.05)


def test_equal_values_have_an_interval_of_positive_width() -> None:
    assert estimate_mean([1.0] * 30, CONFIDENCE, RATE).low < 0.92
    assert estimate_mean([0.5] * 30, CONFIDENCE, RATE).low < 0.45
    assert estimate_paired([0.0] * 30, CONFIDENCE, DIFFERENCE).low < -0.05
    assert estimate_unpaired([1.0] * 30, [1.0] * 30, CONFIDENCE, RATE, RATE).low < -0.05
    assert estimate_mean([512.0] * 30, CONFIDENCE, (0.0, 512.0)).low < 460, "lengths neither"
    assert estimate_mean([512.0] * 30, CONFIDENCE, (0.0, 512.0)).high > 512, "and longer ones were only not seen"


def test_bounds_are_the_wider_of_those_with_and_without_pseudo_observations() -> None:
    values = np.random.default_rng(0).exponential(100.0, 60)
    ends = (0.0, float(values.max()))
    found = estimate_mean(list(values), CONFIDENCE, ends)
    lows, highs = [], []
    for seen in (values, np.concatenate([values, ends, ends])):
        count, quantile = len(seen), stdtrit(len(seen) - 1, CONFIDENCE)
        reach = quantile * seen.std(ddof=1) / math.sqrt(count)
        third = ((seen - seen.mean()) ** 3).mean()
        lows.append(seen.mean() - reach)  # the side without the tail stays
        highs.append(seen.mean() + reach + third / (6 * count * seen.var(ddof=1)) * (1 + 2 * quantile**2))
    assert found.low == pytest.approx(min(lows))
    assert found.high == pytest.approx(max(highs))


def test_pairing_narrows_the_bounds_where_problems_differ_in_difficulty() -> None:
    rng = np.random.default_rng(1)
    difficulty = rng.beta(0.3, 0.3, 200)
    left, right = ((rng.binomial(4, difficulty) / 4).tolist() for _ in range(2))
    paired = estimate_paired([a - b for a, b in zip(left, right, strict=True)], CONFIDENCE, DIFFERENCE)
    unpaired = estimate_unpaired(left, right, CONFIDENCE, RATE, RATE)
    assert paired.mean == pytest.approx(unpaired.mean)
    assert paired.high - paired.low < 0.6 * (unpaired.high - unpaired.low)


# -- the promise: what violates a bound passes in 1 of 20 cases at most ------------------------------------------------

NUM_SIMULATED = 1500
ALLOWED = 0.05 + 3 * math.sqrt(0.05 * 0.95 / NUM_SIMULATED)  # three standard errors of the simulation


def passes(simulate: Callable[[np.random.Generator], bool], seed: int) -> float:
    rng = np.random.default_rng(seed)
    return sum(simulate(rng) for _ in range(NUM_SIMULATED)) / NUM_SIMULATED


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("num_problems", [30, 200])
def test_equal_candidate_is_rarely_better_than_production(share: float, num_problems: int) -> None:
    def is_better(rng: np.random.Generator) -> bool:
        difficulty = rng.beta(2 * share, 2 * (1 - share), num_problems)
        ours, theirs = (rng.random(num_problems) < difficulty for _ in range(2))
        return estimate_paired((ours.astype(float) - theirs).tolist(), CONFIDENCE, DIFFERENCE).low > 0

    assert passes(is_better, num_problems) <= ALLOWED


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_candidate_at_the_margin_is_rarely_no_worse(share: float) -> None:
    def is_no_worse(rng: np.random.Generator) -> bool:
        ours, theirs = rng.random(150) < share - 0.05, rng.random(150) < share
        return estimate_paired((ours.astype(float) - theirs).tolist(), CONFIDENCE, DIFFERENCE).low > -0.05

    assert passes(is_no_worse, 3) <= ALLOWED


def test_equal_candidate_on_other_problems_is_rarely_better() -> None:
    def is_better(rng: np.random.Generator) -> bool:
        ours, theirs = (rng.binomial(4, 0.4, size) / 4 for size in (80, 160))
        return estimate_unpaired(ours.tolist(), theirs.tolist(), CONFIDENCE, RATE, RATE).low > 0

    assert passes(is_better, 4) <= ALLOWED


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_mean_on_the_threshold_rarely_passes_in_either_direction(share: float) -> None:
    def values(rng: np.random.Generator) -> list[float]:
        return (rng.binomial(4, rng.beta(2 * share, 2 * (1 - share), 100)) / 4).tolist()

    assert passes(lambda rng: estimate_mean(values(rng), CONFIDENCE, RATE).low > share, 5) <= ALLOWED
    assert passes(lambda rng: estimate_mean(values(rng), CONFIDENCE, RATE).high < share, 6) <= ALLOWED


def test_skewed_lengths_keep_the_error_rate() -> None:
    def is_shorter(rng: np.random.Generator) -> bool:
        ours, theirs = rng.lognormal(0.2, 0.8, 100), rng.lognormal(0.0, 0.8, 100)
        ratio = math.exp(0.2)
        longest = max(ours.max(), theirs.max())
        ends = (-ratio * longest, longest)
        return estimate_paired((ours - ratio * theirs).tolist(), CONFIDENCE, ends).high < 0

    assert passes(is_shorter, 7) <= ALLOWED


@pytest.mark.parametrize("num_expected", [1, 3, 7])
def test_lengths_that_rarely_change_keep_the_error_rate(num_expected: int) -> None:
    """Greedy answers of two similar models are mostly the same; those that are not may be much longer."""
    num_problems = 100
    mean_change = math.exp(0.7**2 / 2) * num_expected / num_problems

    def is_no_longer(rng: np.random.Generator) -> bool:
        theirs, more = rng.lognormal(0.0, 0.7, num_problems), rng.lognormal(0.0, 0.7, num_problems)
        ours = theirs + more * (rng.random(num_problems) < num_expected / num_problems)
        longest = float(ours.max())
        return estimate_paired((ours - theirs).tolist(), CONFIDENCE, (-longest, longest)).high < mean_change

    assert passes(is_no_longer, num_expected) <= ALLOWED


def test_declared_looks_keep_the_error_rate() -> None:
    looks = (60, 90, 120, 150, 180)

    def is_ever_better(confidence: float) -> Callable[[np.random.Generator], bool]:
        def simulate(rng: np.random.Generator) -> bool:
            ours, theirs = (rng.random(looks[-1]) < 0.5 for _ in range(2))
            differences = (ours.astype(float) - theirs).tolist()
            return any(estimate_paired(differences[:count], confidence, DIFFERENCE).low > 0 for count in looks)

        return simulate

    assert passes(is_ever_better(CONFIDENCE), 10) > 0.08, "stopping at the first good look is cheating"
    assert passes(is_ever_better(1 - 0.05 / len(looks)), 10) <= ALLOWED


# -- how many it would take --------------------------------------------------------------------------------------------


def test_needed_problems_give_a_decision_with_the_requested_power() -> None:
    gain, power = 0.1, 0.8
    rng = np.random.default_rng(8)
    pilot = (rng.random(20_000) < 0.5 + gain).astype(float) - (rng.random(20_000) < 0.5)
    found = estimate_paired(pilot.tolist(), CONFIDENCE, DIFFERENCE)
    few = MeanEstimate(gain, -1.0, 1.0, found.deviation, 50, CONFIDENCE, "paired t")
    needed = needed_problems(few, 0.0, power)
    assert needed is not None

    def is_decided(rng: np.random.Generator) -> bool:
        ours, theirs = rng.random(needed) < 0.5 + gain, rng.random(needed) < 0.5
        return estimate_paired((ours.astype(float) - theirs).tolist(), CONFIDENCE, DIFFERENCE).low > 0

    assert passes(is_decided, 9) == pytest.approx(power, abs=0.04)
    assert detectable_distance(few, needed, power) == pytest.approx(gain, rel=0.01)


def test_estimate_on_the_threshold_needs_no_finite_number() -> None:
    on_it = MeanEstimate(0.5, 0.4, 0.6, 0.5, 100, CONFIDENCE, "t")
    assert needed_problems(on_it, 0.5, 0.8) is None
    assert needed_problems(on_it, 0.5 + 1e-5, 0.8) is None, "more than MAX_ASKED"
    near = needed_problems(on_it, 0.501, 0.8)
    assert near is not None
    assert near == math.ceil(((ndtri(0.95) + ndtri(0.8)) * 0.5 / 0.001) ** 2)
    far = needed_problems(on_it, 0.9, 0.8)
    assert far == 101, "never fewer than there are"


@pytest.mark.parametrize(
    ("hits", "total", "threshold"),
    [
        (0, 30, 0.02),
        (291, 300, 0.95),
        (5, 500, 0.02),
        (3, 300, 0.02),
        (120, 200, 0.55),
        (170, 200, 0.9),
        (30, 30, 0.95),
    ],
)
def test_needed_problems_of_a_rate_are_those_of_the_exact_bound(hits: int, total: int, threshold: float) -> None:
    found = estimate_mean([1.0] * hits + [0.0] * (total - hits), CONFIDENCE, RATE)
    needed = needed_problems(found, threshold, 0.8)
    assert needed is not None
    assert exact_power(hits / total, threshold, needed) >= 0.8
    # Power goes up in a saw-tooth, so a few less may do as well; many less do not.
    assert all(exact_power(hits / total, threshold, count) < 0.8 for count in range(total + 1, int(0.94 * needed)))


def exact_power(rate: float, threshold: float, num_problems: int) -> float:
    """How likely Clopper and Pearson's bound is to be on the rate's side of the threshold, over all numbers of hits."""
    if rate > threshold:
        rate, threshold = 1 - rate, 1 - threshold
    tails = np.cumsum(binomial_chances(num_problems, threshold))  # so few hits, or fewer, if it were on the threshold
    return float(binomial_chances(num_problems, rate)[tails <= 1 - CONFIDENCE].sum())


def binomial_chances(total: int, rate: float) -> np.ndarray:
    if rate == 0:
        return np.eye(1, total + 1)[0]
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])
    hits = np.arange(total + 1)
    return np.exp(logs[-1] - logs - logs[::-1] + hits * math.log(rate) + (total - hits) * math.log1p(-rate))


def test_needed_problems_account_for_pseudo_observations() -> None:
    """Their weight falls as real ones come in: without a single change, the bound narrows with n, not its root."""
    unchanged = estimate_paired([0.0] * 30, CONFIDENCE, DIFFERENCE)
    needed = needed_problems(unchanged, -0.01, 0.8)
    assert needed is not None
    assert estimate_paired([0.0] * needed, CONFIDENCE, DIFFERENCE).low > -0.01
    assert needed < 400
