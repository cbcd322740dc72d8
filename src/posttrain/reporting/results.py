"""What came out of a run: its main metrics from first to last, and what the doctor found. Shown when it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.reporting.doctor import Finding, Severity
from posttrain.reporting.doctor.findings import EARLY_STEPS, health
from posttrain.reporting.presentation import Headline
from posttrain.reporting.rows import is_accuracy
from posttrain.reporting.run_files import Row
from posttrain.reporting.wording import Line, Style, duration, number


@dataclass(frozen=True)
class MetricSummary:
    """First, last and best value of a metric. `metric` is empty if no row has it."""

    metric: str
    first: float = math.nan
    first_step: int = 0
    last: float = math.nan
    best: float = math.nan
    best_step: int = 0


def summarise(rows: Sequence[Row], metric: str, *, lower_is_better: bool = False) -> MetricSummary:
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        return MetricSummary("")
    best_step, best = min(points, key=lambda point: point[1] if lower_is_better else -point[1])
    (first_step, first), (_, last) = points[0], points[-1]
    return MetricSummary(metric, first, first_step, last, best, best_step)


def shown_name(metric: str, rows: Sequence[Row]) -> str:
    """The key of a metric, but that a validation is called accuracy only where it is one."""
    if metric == "validation/accuracy" and not all(is_accuracy(row) for row in rows if metric in row):
        return "validation/reward"
    return metric


def validation_metric(rows: Sequence[Row]) -> tuple[str, bool]:
    """The main validation metric, and whether less is better: accuracy if it was measured."""
    keys = {key for row in rows for key, value in row.items() if key.startswith("validation/") and value is not None}
    for name, lower_is_better in (("accuracy", False), ("reward", False), ("loss", True)):
        if f"validation/{name}" in keys:
            return f"validation/{name}", lower_is_better
    return "", False


FINDING_STYLES: dict[Severity, Style] = {"note": "muted", "warning": "warning", "error": "bad"}


def verdict(findings: Sequence[Finding], num_steps: int) -> str:
    """The health of a run, with the number of its findings."""
    counts = Counter(finding.severity for finding in findings)
    shown = [_counted(counts[severity], severity) for severity in ("error", "warning", "note") if counts[severity]]
    word = health(findings, num_steps)
    return ", ".join(shown if counts["error"] or counts["warning"] else [word, *shown])


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def finding_lines(findings: Sequence[Finding], num_steps: int) -> list[Line]:
    """The summary at the end of a run: every finding with all its fixes."""
    style = FINDING_STYLES[findings[0].severity] if findings else "muted" if num_steps < EARLY_STEPS else "good"
    lines = [Line(f"  • doctor: {verdict(findings, num_steps)}", style)]
    for finding in findings:
        until = f" to {finding.last_step}" if finding.last_step not in (None, finding.step) else ""
        text = f"    - {finding.rule} ({finding.severity}), step {finding.step}{until}: {finding.text}"
        lines.append(Line(text, FINDING_STYLES[finding.severity]))
        if finding.fixes:
            lines.append(Line(f"      fix: {'; or '.join(finding.fixes)}"))
    return lines


def final_lines(
    headline: Headline,
    rows: Sequence[Row],
    reason: str,
    wall_s: float,
    report: str,
    findings: Sequence[Finding] = (),
) -> list[Line]:
    steps = [row["step"] for row in rows if any(key.startswith("train/") for key in row)]
    steps_done = f"{_counted(max(steps, default=0), 'step')}, {duration(wall_s)} in this process."
    lines = [Line(""), Line(f"{reason.rstrip('.')}. {steps_done}", "title")]
    for metric, lower_is_better in ((headline.metric, headline.lower_is_better), validation_metric(rows)):
        found = summarise(rows, metric, lower_is_better=lower_is_better)
        if found.metric:
            since = f" at step {found.first_step}" if found.first_step > 1 else ""
            best = f"best {number(found.best)} at step {found.best_step}"
            trend = f"{number(found.first)}{since} → {number(found.last)}, {best}"
            if sum(row.get(metric) is not None for row in rows) == 1:
                trend = f"{number(found.first)} at step {found.first_step}, measured once"
            lines.append(Line(f"  • {shown_name(metric, rows)}: {trend}"))
    unscored = sum(row.get("train/unscored") or 0 for row in rows)
    if unscored:
        lines.append(Line(f"  • unscored rollouts: {unscored:,.0f} (reasons in the report)", "warning"))
    lines += finding_lines(findings, max(steps, default=0))
    lines.append(Line(f"  • report: {report}", "good"))
    return lines
