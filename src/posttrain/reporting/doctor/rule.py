"""What a rule is, and the fixes that several rules propose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.config.runs import KINDS
from posttrain.reporting.doctor.findings import Severity, Shown
from posttrain.reporting.doctor.history import RunHistory

LR = "policy.optimizer.kwargs.lr"
KL_PENALTY = "loss_fn.reference_policy_kl_penalty"
MAX_NEW_TOKENS = "policy.generation.max_new_tokens"


@dataclass(frozen=True)
class Sighting:
    """The condition of a rule holds at the latest step."""

    severity: Severity
    metric: str
    value: float | None
    text: str
    fixes: tuple[str, ...] = ()
    shown: Shown = "any"


Check = Callable[[RunHistory], Sighting | None]


@dataclass(frozen=True)
class Rule:
    """A check, and what `texts.yaml` says about it."""

    id: str
    kinds: tuple[str, ...]  # of run
    check: Check
    condition: str  # for the documentation
    source: str  # of the thresholds
    advice: str  # what a finding means and what to do about it
    at_end: bool = False  # about the whole run: looked at when it is over

    @property
    def of(self) -> str:
        """The kinds of run in words."""
        return "all" if self.kinds == KINDS else ", ".join(kind.upper() for kind in self.kinds)


def lower_lr(run: RunHistory, factor: float = 10.0) -> str:
    """The learning rate divided by `factor`, on two digits."""
    lr = run.number_setting(LR)
    if lr is None:
        lr = max(run.values("train/lr"), default=None)
    return run.fix(LR, "a tenth of it" if lr is None else short(lr / factor))


def higher_kl_penalty(run: RunHistory) -> str:
    penalty = run.number_setting(KL_PENALTY)
    if penalty is None and run.values("train/kl_penalty"):  # it has a price, and the settings are not known
        return run.fix(KL_PENALTY, "five times as much")
    return run.fix(KL_PENALTY, short(5 * penalty if penalty else 0.01))


def longer_answers(run: RunHistory) -> str:
    limit = run.number_setting(MAX_NEW_TOKENS)
    if limit is None:
        limit = max(run.values("train/max_generation_length"), default=0.0)
    return run.fix(MAX_NEW_TOKENS, str(int(2 * limit)) if limit else "twice as many")


def short(value: float) -> str:
    """A number as one would type it: two significant digits."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}"
    exponent = math.floor(math.log10(abs(value)))
    digits = f"{value / 10**exponent:.1f}".removesuffix(".0")
    return f"{digits}e{exponent}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
