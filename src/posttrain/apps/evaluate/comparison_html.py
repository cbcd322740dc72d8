"""A comparison as one self-contained HTML page, in the style of a run's report."""

from __future__ import annotations

from pathlib import Path

from posttrain.apps.evaluate.comparison import EvaluationComparison
from posttrain.apps.evaluate.results import Evaluation
from posttrain.reporting.pages import render_page

MAX_SHOWN = 200  # changed problems with their answers


def render(comparison: EvaluationComparison) -> str:
    c = comparison
    names = dict.fromkeys([*c.first.summary.metrics, *c.second.summary.metrics])
    return render_page(
        Path(__file__).with_name("comparison.html"),
        title=f"{c.first.summary.dataset}: {c.second.summary.model} against {c.first.summary.model}",
        facts=f"{c.metric} · {len(c.pairs)} problems · {c.test}",
        status_words=c.verdict,
        c=c,
        sides=[(name, _value(c.first, name), _value(c.second, name)) for name in names],
        max_shown=MAX_SHOWN,
    )


def _value(evaluation: Evaluation, name: str) -> str:
    value, interval = evaluation.summary.metrics.get(name), evaluation.summary.intervals.get(name)
    if value is None:
        return "not measured"
    return f"{value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if interval else "")
