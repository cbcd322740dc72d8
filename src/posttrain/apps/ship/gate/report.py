"""A verdict as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime

from posttrain import __version__
from posttrain.apps.evaluate.results import Evaluation
from posttrain.apps.ship.gate.verdict import BoundResult, Evaluations, GateResult
from posttrain.config.gate import GateConfig
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.reporting.pages import Html, bullets, header, interval_mark, join, note, page, section, table, tag, when
from posttrain.reporting.scales import label

FORMAT_VERSION = 1
WORDS = {"promote": "promote", "reject": "reject", "needs_more_samples": "needs more samples"}
OUTCOMES = {"pass": "holds", "fail": "does not hold", "undecided": "undecided", "skipped": "skipped"}
_STYLE = """
.verdict-promote { background: var(--good-wash); } .verdict-promote b { color: var(--good); }
.verdict-reject { background: var(--bad-wash); } .verdict-reject b { color: var(--bad); }
.verdict-needs_more_samples b { color: var(--warn); }
.outcome-pass { color: var(--good); } .outcome-fail { color: var(--bad); }
.outcome-undecided { color: var(--warn); } .why { color: var(--soft); font-size: 12px; max-width: 46em; }
"""


def as_json(
    result: GateResult, config: GateConfig, candidate: Evaluations, production: Evaluations | None
) -> JsonObject:
    """What `--json` writes, and what `posttrain registry add --gate` reads."""
    return {
        "format": FORMAT_VERSION,
        "verdict": result.verdict,
        "reasons": result.reasons,
        "needed_problems": result.needed_problems,
        "rules": [_finite(asdict(rule)) for rule in result.rules],
        "notes": list(result.notes),
        "candidate": {name: _identity(evaluation) for name, evaluation in candidate.items()},
        "production": None
        if production is None
        else {name: _identity(evaluation) for name, evaluation in production.items()},
        "gate": config.model_dump(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_version": __version__,
    }


def _finite(value: object) -> object:
    """null for the infinite bounds of a single problem: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _identity(evaluation: Evaluation) -> dict[str, object]:
    summary = evaluation.summary
    return {
        "folder": str(evaluation.folder),
        "model": summary.model,
        "model_fingerprint": summary.model_fingerprint,
        "dataset": summary.dataset,
        "problem_set_hash": summary.problem_set_hash,
        "problems": summary.counts.problems,
        "samples_per_problem": summary.num_tests_per_prompt,
        "metrics": dict(summary.metrics),
    }


def as_html(report: JsonMapping, result: GateResult) -> str:
    models = dict.fromkeys(one["model"] for one in report["candidate"].values())
    title = f"Gate: {', '.join(models)}"
    confidence = f"bounds at {100 * report['gate']['gate']['confidence']:g} %"
    facts = f"{when(report['at'])} · {confidence} · posttrain {report['code_version']}"
    verdict = report["verdict"]
    return page(
        title,
        header(title, facts, tag("b", WORDS[verdict]), status_kind=f"verdict-{verdict}"),
        _reasons(result),
        _rules(result),
        _evaluations(report),
        section("Notes", bullets(result.notes)) if result.notes else "",
        style=_STYLE,
    )


def _reasons(result: GateResult) -> Html:
    needed = ", ".join(f"{count:,} problems in {name}" for name, count in result.needed_problems.items())
    return section("Why", bullets(result.reasons), tag("p", f"To decide: {needed}.") if needed else "")


def _rules(result: GateResult) -> Html:
    explanation = (
        "The line is the interval between the two one-sided bounds, the dot the estimate, the dashed line the threshold. "
        "Of a comparison the estimate is the difference to production."
    )
    headings = ("check", "demand", "outcome", "candidate", "production", "problems", "estimate and threshold")
    return section("Checks", note(explanation), table(headings, map(_result_row, result.rules), numbers=(3, 4, 5)))


def _result_row(rule: BoundResult) -> tuple[object, ...]:
    return (
        join((tag("b", rule.check), Html("<br>"), f"{rule.metric} of {rule.evaluation}")),
        rule.demand,
        tag("span", OUTCOMES[rule.outcome], kind=f"outcome-{rule.outcome}"),
        _number(rule.candidate),
        _number(rule.production),
        "" if rule.estimate is None else f"{rule.estimate.num_problems:,}",
        join((_mark(rule), tag("div", rule.reason, kind="why"))),
    )


def _mark(rule: BoundResult) -> Html:
    estimate, threshold = rule.estimate, rule.threshold
    if estimate is None or threshold is None or not math.isfinite(estimate.high - estimate.low):
        return Html()
    return interval_mark(estimate.low, estimate.mean, estimate.high, threshold)


def _evaluations(report: JsonMapping) -> Html:
    rows = [
        (
            side,
            name,
            one["model"],
            one["dataset"],
            f"{one['problems']:,}",
            one["samples_per_problem"],
            one["folder"],
        )
        for side in ("candidate", "production")
        for name, one in (report[side] or {}).items()
    ]
    headings = ("", "name", "model", "dataset", "problems", "samples", "folder")
    return section("Evaluations", table(headings, rows, numbers=(4, 5)))


def _number(value: float | None) -> str:
    return "–" if value is None else label(value)
