"""A verdict as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from posttrain import __version__
from posttrain.apps.evaluate.results import Evaluation
from posttrain.apps.ship.gate.verdict import Evaluations, GateResult
from posttrain.config.gate import GateConfig
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.files.locks import now_text
from posttrain.reporting.pages import render_page, when

FORMAT_VERSION = 1
WORDS = {"promote": "promote", "reject": "reject", "needs_more_samples": "needs more samples"}
OUTCOMES = {"pass": "holds", "fail": "does not hold", "undecided": "undecided", "skipped": "skipped"}


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
        "at": now_text(),
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
    verdict, confidence = report["verdict"], f"bounds at {100 * report['gate']['gate']['confidence']:g} %"
    facts = ("model", "dataset", "problems", "samples_per_problem", "folder")
    return render_page(
        Path(__file__).with_name("report.html"),
        title=f"Gate: {', '.join(dict.fromkeys(one['model'] for one in report['candidate'].values()))}",
        facts=f"{when(report['at'])} · {confidence} · posttrain {report['code_version']}",
        status=WORDS[verdict],
        status_kind=f"verdict-{verdict}",
        result=result,
        outcomes=OUTCOMES,
        isfinite=math.isfinite,
        evaluations=[
            (side, name, *(f"{one[key]:,}" if key == "problems" else one[key] for key in facts))
            for side in ("candidate", "production")
            for name, one in (report[side] or {}).items()
        ],
    )
