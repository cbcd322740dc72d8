"""The metrics `pass@k`, `cons@k` and `avg@k`, computed from rewards and answers.

pass@k (arXiv:2107.03374) is the chance that at least one of k samples passes, estimated without bias from n >= k
samples. cons@k is the chance that the majority of k samples passes: equal answers vote together, a tie goes to the
answer that came first; averaged over all k-subsets of the n samples as in NeMo RL, but in closed form instead of by
enumeration. avg@k is the mean reward. Each is a number per problem; a metric is their mean over the problems.

Unscored samples do not count: they lower n. If fewer than k scored samples remain, k is reduced to their number, which
can only lower pass@k. Problems without scored samples are skipped. Samples without an answer do not vote (in NeMo RL
they do). Used by `posttrain eval`, by the gate and by validation during training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from posttrain.errors import InputError

MetricKind = Literal["pass", "cons", "avg"]
ANY_POSITIVE_REWARD = math.ulp(0.0)  # as a threshold: every reward above 0 passes


@dataclass(frozen=True)
class Metric:
    kind: MetricKind
    k: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.k}"


def parse_metric(name: str) -> Metric:
    """A metric name such as `pass@1`."""
    found = re.fullmatch(r"(pass|cons|avg)@([1-9]\d*)", name)
    if found is None:
        raise InputError(f"metric {name!r}: expected pass@k, cons@k or avg@k with a number for k, such as pass@1")
    kind: MetricKind = found[1]  # type: ignore[assignment]
    return Metric(kind, int(found[2]))


# -- one problem -------------------------------------------------------------------------------------------------------


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the share of k-subsets of the samples that hold at least one that passed."""
    assert 0 <= num_passed <= num_samples >= k >= 1
    if k == 1:
        return num_passed / num_samples
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def cons_at_k(answers: Sequence[Hashable | None], passed: Sequence[bool], k: int) -> float:
    """The share of k-subsets whose majority answer passes. `None` abstains; a subset in which all abstain fails.

    A subset is won by answer `a` with m votes, the first of them at place p, if every other answer has fewer votes, or
    m votes that all come after p. Each factor below counts the ways to choose votes of one answer, by their number.
    """
    assert len(answers) == len(passed) >= k >= 1
    places: dict[Hashable, list[int]] = {}
    for place, answer in enumerate(answers):
        if answer is not None:
            places.setdefault(answer, []).append(place)
    num_abstain = len(answers) - sum(map(len, places.values()))
    won = 0
    for answer, own in places.items():
        for rank, first in enumerate(own):
            if not passed[first]:
                continue
            others = [votes for other, votes in places.items() if other != answer]
            for num_votes in range(1, min(len(own) - rank, k) + 1):
                ways = math.comb(len(own) - rank - 1, num_votes - 1)
                won += ways * _losing_ways(others, num_abstain, num_votes, first, k - num_votes)
    return won / math.comb(len(answers), k)


def _losing_ways(others: Sequence[Sequence[int]], num_abstain: int, num_votes: int, first: int, left: int) -> int:
    """The number of ways to choose `left` samples from the other answers such that none of those answers wins."""
    ways = [1, *[0] * left]
    for votes in others:
        later = sum(place > first for place in votes)
        factor = _factor(len(votes), num_votes, later, left)
        ways = _product(ways, factor, left)
    abstaining = [math.comb(num_abstain, count) for count in range(min(num_abstain, left) + 1)]
    return _product(ways, abstaining, left)[left]


@lru_cache(maxsize=4096)
def _factor(num_votes: int, limit: int, num_later: int, left: int) -> tuple[int, ...]:
    """Ways to choose 0, 1, … votes of an answer that has `num_votes`: fewer than `limit`, or `limit` later ones."""
    fewer = [math.comb(num_votes, count) for count in range(min(num_votes, limit - 1, left) + 1)]
    tied = math.comb(num_later, limit) if limit <= left else 0
    return (*fewer, tied) if tied else tuple(fewer)


def _product(left_factor: Sequence[int], right_factor: Sequence[int], degree: int) -> list[int]:
    result = [0] * (degree + 1)
    for i, a in enumerate(left_factor):
        if a:
            for j, b in enumerate(right_factor[: degree + 1 - i]):
                result[i + j] += a * b
    return result


def problem_value(
    metric: Metric, rewards: Sequence[float | None], answers: Sequence[Hashable | None], pass_threshold: float
) -> float | None:
    """The metric of one problem; None without scored samples."""
    scored = [(reward, answer) for reward, answer in zip(rewards, answers, strict=True) if reward is not None]
    if not scored:
        return None
    passed = [reward >= pass_threshold for reward, _ in scored]
    k = min(metric.k, len(scored))
    if metric.kind == "avg":
        return math.fsum(reward for reward, _ in scored) / len(scored)
    if metric.kind == "pass":
        return pass_at_k(len(scored), sum(passed), k)
    return cons_at_k([answer for _, answer in scored], passed, k)


# -- many problems -----------------------------------------------------------------------------------------------------


def measured_mean(values: Sequence[float | None]) -> tuple[float, int] | None:
    """(sum, count) over the measured problems; None if there are none."""
    measured = [value for value in values if value is not None]
    return (math.fsum(measured), len(measured)) if measured else None


def reward_metrics(rewards: Sequence[Sequence[float | None]], pass_threshold: float) -> dict[str, float]:
    """avg@n and, for n > 1, pass@n of problems with n rewards each. Reported by validation during training."""
    num_samples = max(map(len, rewards), default=0)
    wanted = [Metric("avg", num_samples), Metric("pass", num_samples)] if num_samples > 1 else [Metric("avg", 1)]
    found = {}
    for metric in wanted if num_samples else []:
        values = [problem_value(metric, row, [None] * len(row), pass_threshold) for row in rewards]
        if total := measured_mean(values):
            found[str(metric)] = total[0] / total[1]
    return found
