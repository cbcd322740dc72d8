"""A canary: a share of the traffic goes to a new version, and back to the old one if the new one does worse.

Routing depends on a key alone (the user, or else the request), so a user stays with one version, and a larger share
keeps the users of a smaller one. Two rules send all traffic back, for good:

- **errors**: more than `max_error_rate` of the canary's last `window` answers failed, once there are `min_requests`;
- **KPI**: the canary's mean score is below production's by more than `max_kpi_drop`, and the difference is significant
  in a one-sided Welch test at 95 %, once both versions have `min_feedback` scores.

No HTTP and no model here.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from posttrain.apps.options import Option, check_ranges
from posttrain.errors import InputError
from posttrain.files.digests import blake2_of

PRODUCTION = "production"
CANARY = "canary"
_ONE_SIDED_95 = 1.6449
_MOST_REMEMBERED_ANSWERS = 100_000


@dataclass(frozen=True)
class CanaryRules:
    share: Annotated[float, Option("of users, or of requests", "SHARE", at_least=0, at_most=1)] = 0.1
    max_error_rate: Annotated[float, Option("a higher rate sends all traffic back", "RATE", at_least=0, at_most=1)] = (
        0.05
    )
    min_requests: Annotated[int, Option("before that is judged", at_least=1)] = 20
    window: int = 200  # number of recent answers that count
    max_kpi_drop: Annotated[
        float | None, Option("mean score of /v1/feedback below production's (default: off)", at_least=0)
    ] = None
    min_feedback: Annotated[int, Option("scores of each, before that", at_least=2)] = 30

    def __post_init__(self) -> None:
        check_ranges(self, "canary_")
        if self.min_requests > self.window:
            raise InputError(f"--canary-min-requests is {self.min_requests}: 1 to {self.window} is accepted")


@dataclass
class Scores:
    """Running mean and variance of scores (Welford)."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, score: float) -> None:
        self.count += 1
        delta = score - self.mean
        self.mean += delta / self.count
        self._squares += delta * (score - self.mean)

    def mean_or_nan(self) -> float:
        return self.mean if self.count else math.nan

    @property
    def variance(self) -> float:
        return self._squares / (self.count - 1) if self.count > 1 else 0.0


class Canary:
    """`on_rollback` is called once, with the reason."""

    def __init__(self, rules: CanaryRules, on_rollback: Callable[[str], None] | None = None) -> None:
        self.rules = rules
        self.rollback_reason: str | None = None
        self.scores = {PRODUCTION: Scores(), CANARY: Scores()}
        self._on_rollback = on_rollback
        self._outcomes: deque[bool] = deque(maxlen=rules.window)

    @property
    def share(self) -> float:
        return 0.0 if self.rollback_reason is not None else self.rules.share

    def takes(self, key: str) -> bool:
        """Whether the canary answers requests with this key."""
        return place_of(key) < self.share

    def answered(self, version: str, *, ok: bool) -> None:
        """An answer was finished, or failed due to a server error. Rejected requests and disconnected clients do not
        count.
        """
        if version != CANARY or self.rollback_reason is not None:
            return
        self._outcomes.append(ok)
        count, failures = len(self._outcomes), self._outcomes.count(False)
        if count >= self.rules.min_requests and failures / count > self.rules.max_error_rate:
            self.roll_back(
                f"{failures} of its last {count} answers failed, {failures / count:.1%}; "
                f"{self.rules.max_error_rate:.1%} are allowed"
            )

    def rated(self, version: str, score: float) -> None:
        self.scores[version].add(score)
        if self.rollback_reason is not None or self.rules.max_kpi_drop is None:
            return
        old, new = self.scores[PRODUCTION], self.scores[CANARY]
        if min(old.count, new.count) < self.rules.min_feedback:
            return
        drop = old.mean - new.mean
        error = math.sqrt(old.variance / old.count + new.variance / new.count)
        if drop > self.rules.max_kpi_drop and drop > _ONE_SIDED_95 * error:
            means = f"{new.mean:.4g} over {new.count} answers and production's {old.mean:.4g} over {old.count}"
            change = f"a drop of {drop:.3g} ± {_ONE_SIDED_95 * error:.2g}; {self.rules.max_kpi_drop:g} is allowed"
            self.roll_back(f"its mean score is {means}: {change}")

    def roll_back(self, reason: str) -> None:
        """Route all traffic to production from now on."""
        if self.rollback_reason is None:
            self.rollback_reason = reason
            if self._on_rollback is not None:
                self._on_rollback(reason)


class AnswerLog:
    """Which version gave which answer, up to a limit: the oldest are dropped first."""

    def __init__(self, limit: int = _MOST_REMEMBERED_ANSWERS) -> None:
        self._limit = limit
        self._versions: OrderedDict[str, str] = OrderedDict()

    def remember(self, answer_id: str, version: str) -> None:
        self._versions[answer_id] = version
        if len(self._versions) > self._limit:
            self._versions.popitem(last=False)

    def take(self, answer_id: str) -> str | None:
        """The version, once: an answer is rated once."""
        return self._versions.pop(answer_id, None)


def place_of(key: str) -> float:
    """A number between 0 and 1 from a key; the same in every process."""
    return int.from_bytes(blake2_of(key, 8), "big") / 2**64
