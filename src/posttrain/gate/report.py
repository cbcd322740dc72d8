"""A verdict as JSON, and as one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from posttrain import __version__
from posttrain.config.gate import GateConfig
from posttrain.evaluation.results import Evaluation
from posttrain.gate.verdict import Evaluations, GateResult, Rule
from posttrain.reporting.scales import Axis, label

FORMAT_VERSION = 1
WORDS = {"promote": "promote", "reject": "reject", "needs_more_samples": "needs more samples"}
OUTCOMES = {"pass": "holds", "fail": "does not hold", "undecided": "cannot be told", "skipped": "skipped"}
_WIDTH, _HEIGHT = 240, 30
_STYLE = """
.interval { display: block; width: 240px; height: 30px; }
.interval .reach { stroke: var(--soft); stroke-width: 2; } .interval .mean { fill: var(--ink); }
.interval .wall { stroke: var(--c1); stroke-width: 1.5; stroke-dasharray: 3 2; }
.interval text { font: 10px var(--mono); fill: var(--soft); }
.verdict-promote { background: var(--good-wash); } .verdict-promote b { color: var(--good); }
.verdict-reject { background: var(--bad-wash); } .verdict-reject b { color: var(--bad); }
.verdict-needs_more_samples b { color: var(--warn); }
td { vertical-align: top; } td.outcome-pass { color: var(--good); } td.outcome-fail { color: var(--bad); }
td.outcome-undecided { color: var(--warn); } .why { color: var(--soft); font-size: 12px; max-width: 46em; }
"""


def as_json(
    result: GateResult, config: GateConfig, candidate: Evaluations, production: Evaluations | None
) -> dict[str, Any]:
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


def _finite(value: Any) -> Any:
    """null for a bound that is infinite (of a single problem): JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _identity(evaluation: Evaluation) -> dict[str, Any]:
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


def as_html(report: Mapping[str, Any], result: GateResult) -> str:
    style = (files("posttrain.reporting") / "assets" / "report.css").read_text("utf-8") + _STYLE
    models = dict.fromkeys(one["model"] for one in report["candidate"].values())
    title = f"Gate: {', '.join(models)}"
    body = "".join((_header(report, title), _reasons(result), _rules(result), _evaluations(report), _notes(result)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · posttrain</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _header(report: Mapping[str, Any], title: str) -> str:
    gate = report["gate"]["gate"]
    when = str(report["at"])[:16].replace("T", " ")
    facts = f"{when} UTC · bounds at {100 * gate['confidence']:g} % · posttrain {report['code_version']}"
    verdict = report["verdict"]
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="facts">{escape(facts)}</p></div>'
        f'<p class="status verdict-{verdict}"><b>{WORDS[verdict]}</b></p></header>'
    )


def _reasons(result: GateResult) -> str:
    lines = "".join(f"<li>{escape(reason)}</li>" for reason in result.reasons)
    needed = ", ".join(f"{count:,} problems in {escape(name)}" for name, count in result.needed_problems.items())
    asked = f"<p>To decide: {needed}.</p>" if needed else ""
    return f"<section><h2>Why</h2><ul>{lines}</ul>{asked}</section>"


def _rules(result: GateResult) -> str:
    head = "".join(
        f"<th{' class=n' if name in ('candidate', 'production', 'problems') else ''}>{name}</th>"
        for name in ("check", "demand", "outcome", "candidate", "production", "problems", "estimate and threshold")
    )
    rows = "".join(_rule_row(rule) for rule in result.rules)
    note = (
        "<p class='note'>The line is the interval between the two one-sided bounds, the dot the estimate, the dashed "
        "line the threshold. Of a comparison the estimate is the difference to production.</p>"
    )
    return f"<section><h2>Checks</h2>{note}<table><tr>{head}</tr>{rows}</table></section>"


def _rule_row(rule: Rule) -> str:
    problems = "" if rule.estimate is None else f"{rule.estimate.num_problems:,}"
    return (
        f"<tr><td><b>{escape(rule.check)}</b><br>{escape(rule.metric)} of {escape(rule.evaluation)}</td>"
        f"<td>{escape(rule.demand)}</td><td class='outcome-{rule.outcome}'>{OUTCOMES[rule.outcome]}</td>"
        f"<td class='n'>{_number(rule.candidate)}</td><td class='n'>{_number(rule.production)}</td>"
        f"<td class='n'>{problems}</td><td>{_picture(rule)}<div class='why'>{escape(rule.reason)}</div></td></tr>"
    )


def _picture(rule: Rule) -> str:
    estimate, threshold = rule.estimate, rule.threshold
    if estimate is None or threshold is None or not abs(estimate.high - estimate.low) < float("inf"):
        return ""
    low, high = min(estimate.low, threshold), max(estimate.high, threshold)
    pad = 0.08 * (high - low) or 1.0
    x = Axis(low - pad, high + pad, 4, _WIDTH - 4)
    middle, wall = 11, x(threshold)
    anchor = "start" if wall < 0.25 * _WIDTH else "end" if wall > 0.75 * _WIDTH else "middle"
    return (
        f'<svg class="interval" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'<line class="wall" x1="{wall}" x2="{wall}" y1="2" y2="20"/>'
        f'<line class="reach" x1="{x(estimate.low)}" x2="{x(estimate.high)}" y1="{middle}" y2="{middle}"/>'
        f'<circle class="mean" cx="{x(estimate.mean)}" cy="{middle}" r="3.5"/>'
        f'<text x="{wall}" y="{_HEIGHT - 1}" text-anchor="{anchor}">{label(threshold)}</text></svg>'
    )


def _evaluations(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{side}</td><td>{escape(name)}</td><td>{escape(one['model'])}</td><td>{escape(one['dataset'])}</td>"
        f"<td class='n'>{one['problems']:,}</td><td class='n'>{one['samples_per_problem']}</td>"
        f"<td>{escape(one['folder'])}</td></tr>"
        for side in ("candidate", "production")
        for name, one in (report[side] or {}).items()
    )
    names = ("", "name", "model", "dataset", "problems", "samples", "folder")
    head = "".join(f"<th{' class=n' if name in ('problems', 'samples') else ''}>{name}</th>" for name in names)
    return f"<section><h2>Evaluations</h2><table><tr>{head}</tr>{rows}</table></section>"


def _notes(result: GateResult) -> str:
    lines = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return f"<section><h2>Notes</h2><ul>{lines}</ul></section>" if lines else ""


def _number(value: float | None) -> str:
    return "–" if value is None else label(value)
