"""The gate: every check of gate.yaml against the evaluations of a candidate and of the model in production.

A candidate is promoted if all bounds hold, each at the requested confidence, and rejected if one fails. Otherwise more
samples are needed, and the verdict has the number. *All* bounds have to hold (an intersection-union test), so several
bounds need no correction: the probability of promoting a candidate that violates a bound is at most that of this bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.apps.evaluate.identity import different_settings, why_incomparable
from posttrain.apps.evaluate.results import Evaluation
from posttrain.apps.ship.gate.measures import depends_on_judge, direction_of, measure
from posttrain.apps.ship.gate.rules import (
    Bound,
    BoundDecision,
    Outcome,
    absolute_bounds,
    compare,
    decide,
    estimate_alone,
    margin_bound,
    sign_of_mean,
)
from posttrain.apps.ship.gate.statistics import MeanEstimate
from posttrain.config.gate import COST, CheckConfig, GateConfig, GateSettings
from posttrain.errors import InputError
from posttrain.reporting.examination import errors_of_model

Verdict = Literal["promote", "reject", "needs_more_samples"]
Evaluations = Mapping[str, Evaluation]  # by the name that checks use

_NO_SHARE = "the mean of production may have either sign, so a relative margin is not defined: set relative to false"
_DECIDING: Mapping[Verdict, Outcome] = {"promote": "pass", "reject": "fail", "needs_more_samples": "undecided"}


@dataclass(frozen=True)
class BoundResult:
    """The outcome of one bound of one check, and what led to it."""

    check: str
    evaluation: str
    metric: str
    demand: str  # "at least 0.3", "better than production by 0.02"
    outcome: Outcome
    reason: str
    candidate: float | None = None
    production: float | None = None
    estimate: MeanEstimate | None = None  # of the candidate, or of its difference to production
    threshold: float | None = None
    needed_problems: int | None = None

    @property
    def label(self) -> str:
        return f"{self.check}: {self.metric} of {self.evaluation} {self.demand}"


@dataclass(frozen=True)
class GateResult:
    verdict: Verdict
    rules: tuple[BoundResult, ...]
    notes: tuple[str, ...]  # caveats about the evaluations

    @property
    def reasons(self) -> list[str]:
        """The bounds that decided the verdict, with their reasons."""
        deciding = _DECIDING[self.verdict]
        return [f"{rule.label}: {rule.reason}" for rule in self.rules if rule.outcome == deciding]

    @property
    def needed_problems(self) -> dict[str, int]:
        """For each evaluation the number of problems that would decide the open bounds; empty for other verdicts."""
        found: dict[str, int] = {}
        if self.verdict != "needs_more_samples":
            return found
        for rule in self.rules:
            if rule.outcome == "undecided" and rule.needed_problems:
                found[rule.evaluation] = max(found.get(rule.evaluation, 0), rule.needed_problems)
        return found


def judge(config: GateConfig, candidate: Evaluations, production: Evaluations | None) -> GateResult:
    """`production` None: there is no model in production yet, so bounds that compare with it are skipped."""
    _refuse_missing(config, candidate, "--candidate")
    if production is not None:
        compared = {name: check for name, check in config.checks.items() if check.compares}
        _refuse_missing(GateConfig.model_construct(checks=compared), production, "--production")
    rules = [*_unscored_rules(config, candidate, production), *_doctor_rules(config, candidate)]
    for name, check in config.checks.items():
        rules += _check_rules(name, check, config.gate, candidate, production)
    outcomes = {rule.outcome for rule in rules}
    verdict: Verdict = (
        "reject" if "fail" in outcomes else "needs_more_samples" if "undecided" in outcomes else "promote"
    )
    if outcomes <= {"skipped"}:
        raise InputError(
            "every check compares with production, and there is none: give at least one check an at_least or at_most"
        )
    return GateResult(verdict, tuple(rules), tuple(_notes(config, candidate, production)))


def _check_rules(
    name: str, check: CheckConfig, settings: GateSettings, candidate: Evaluations, production: Evaluations | None
) -> Iterator[BoundResult]:
    where = f"checks.{name}"
    confidence = 1 - (1 - (check.confidence or settings.confidence)) / settings.looks
    noise = settings.speed_noise if check.metric == COST else 0.0
    ours = measure(candidate[check.evaluation], check, where)
    # Each bound, the decision, the estimate that led to it, and the mean of production if it was compared.
    decided: list[tuple[Bound, BoundDecision, MeanEstimate | None, float | None]] = []
    for bound in absolute_bounds(check.at_least, check.at_most):
        estimate = estimate_alone(ours, confidence, noise)
        decided.append((bound, decide(estimate, bound, settings), estimate, None))
    margins = [pair for pair in ((check.better_by, None), (None, check.worse_by_at_most)) if pair != (None, None)]
    theirs = None
    if margins and production is not None:
        others = production[check.evaluation]
        if depends_on_judge(check.metric):
            uses_threshold = check.metric.startswith(("pass@", "cons@"))
            names = ("the candidate", "production")
            reason = why_incomparable(candidate[check.evaluation], others, names, uses_threshold=uses_threshold)
            if reason:
                raise InputError(
                    f"{where}: {check.metric} cannot be compared: {reason}. Evaluate both with the same settings"
                )
        theirs = measure(others, check, where)
    sign = sign_of_mean(theirs, confidence) if check.relative and theirs is not None else 1
    for better_by, worse_by in margins:
        bound, scale = margin_bound(better_by, worse_by, check.relative, direction_of(check, where), sign or 1)
        if theirs is None:
            decided.append((bound, BoundDecision("skipped", "there is no model in production"), None, None))
        elif sign is None:
            decided.append((bound, BoundDecision("undecided", _NO_SHARE), None, theirs.mean))
        else:
            estimate, note = compare(ours, theirs, scale, confidence, noise)
            decision = decide(estimate, bound, settings)
            reason = f"{decision.reason} ({note})" if note else decision.reason
            decided.append((bound, replace(decision, reason=reason), estimate, theirs.mean))
    for bound, decision, found, compared_with in decided:
        yield BoundResult(
            check=name,
            evaluation=check.evaluation,
            metric=check.metric,
            demand=bound.demand,
            outcome=decision.outcome,
            reason=decision.reason,
            candidate=ours.mean,
            production=compared_with,
            estimate=found,
            threshold=bound.threshold,
            needed_problems=decision.needed,
        )


def _unscored_rules(
    config: GateConfig, candidate: Evaluations, production: Evaluations | None
) -> Iterator[BoundResult]:
    """An answer without a score is missing, not wrong. With too many of them the evaluation decides nothing."""
    limit = config.gate.max_unscored_rate
    used = dict.fromkeys(check.evaluation for check in config.checks.values())
    for side, evaluations in (("candidate", candidate), ("production", production or {})):
        for name in used:
            if name not in evaluations:
                continue
            counts = evaluations[name].summary.counts
            rate = counts.unscored / counts.samples
            if rate > limit:
                yield BoundResult(
                    check="unscored",
                    evaluation=name,
                    metric="unscored_rate",
                    demand=f"at most {limit:g} (gate.max_unscored_rate)",
                    outcome="undecided",
                    reason=f"{counts.unscored} of {counts.samples} answers of the {side} have no score; score them "
                    "again",
                    candidate=rate if side == "candidate" else None,
                    production=rate if side == "production" else None,
                    threshold=limit,
                )


def _doctor_rules(config: GateConfig, candidate: Evaluations) -> Iterator[BoundResult]:
    """Errors in the training of the candidate, if its run is available."""
    if config.gate.on_doctor_error != "reject":
        return
    for name, problems in _doctor_errors(candidate).items():
        yield BoundResult(
            check="doctor",
            evaluation=name,
            metric="errors in training",
            demand="none (gate.on_doctor_error)",
            outcome="fail",
            reason="; ".join(problems),
        )


def _doctor_errors(candidate: Evaluations) -> dict[str, list[str]]:
    """By evaluation; a run that several of them evaluate is named with the first."""
    found: dict[str, list[str]] = {}
    models: set[str] = set()
    for name, evaluation in candidate.items():
        model = evaluation.summary.model
        if model not in models and (errors := errors_of_model(model)):
            found[name] = [error.line for error in errors]
        models.add(model)
    return found


def _refuse_missing(config: GateConfig, evaluations: Evaluations, option: str) -> None:
    for name, check in config.checks.items():
        if check.evaluation not in evaluations:
            given = ", ".join(evaluations) or "none"
            raise InputError(
                f"checks.{name}.evaluation is {check.evaluation!r}, and {option} has given: {given}. "
                f"Give {option} {check.evaluation}=FOLDER"
            )


def _notes(config: GateConfig, candidate: Evaluations, production: Evaluations | None) -> Iterator[str]:
    if config.gate.looks > 1:
        yield f"the error probability is shared among {config.gate.looks} looks"
    if config.gate.on_doctor_error == "note":
        for name, problems in _doctor_errors(candidate).items():
            yield f"{name}: the doctor found in the candidate's training: {'; '.join(problems)}"
    for name, ours in candidate.items():
        if production is None or name not in production:
            continue
        theirs = production[name]
        fingerprint = ours.summary.model_fingerprint
        if fingerprint is not None and fingerprint == theirs.summary.model_fingerprint:
            yield f"{name}: candidate and production are the same weights"
        if different := different_settings(ours, theirs):
            shown = "; ".join(f"{key} {ours!s:.200} against {theirs!s:.200}" for key, ours, theirs in different[:5])
            yield f"{name}: evaluated under different settings: {shown}"
