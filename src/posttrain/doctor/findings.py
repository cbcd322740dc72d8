"""What the doctor says: one problem of a run, its evidence, and the setting that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.json_files import JsonMapping, JsonObject

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")  # from the mildest
MAX_TEXT = 400  # characters of an answer that are kept as evidence


@dataclass(frozen=True)
class Answer:
    """A rollout that shows the problem."""

    id: str  # of its task
    text: str
    reward: float | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Finding:
    step: int  # at which the condition of the rule held first, at this severity
    rule: str
    severity: Severity
    metric: str
    value: float | None
    text: str  # one sentence: what is wrong
    fixes: tuple[str, ...]  # settings as key=value, the likeliest first; what is no setting is a sentence
    source: str  # of the threshold
    answers: tuple[Answer, ...] = ()
    last_step: int | None = None  # at which the condition held last; None while nothing after `step` is known

    @property
    def line(self) -> str:
        """The finding on one line."""
        fix = f"; fix: {self.fixes[0]}" if self.fixes else ""
        return f"{self.rule} ({self.severity}) at step {self.step}: {self.text}{fix}"

    def to_json(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_json(cls, row: JsonMapping) -> Finding:
        known: dict[str, Any] = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        known["fixes"] = tuple(row.get("fixes", ()))
        known["answers"] = tuple(Answer(**answer) for answer in row.get("answers", ()))
        return cls(**known)


def rank(severity: Severity) -> int:
    return SEVERITIES.index(severity)


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity; None where there is nothing to say."""
    return max((finding.severity for finding in findings), key=rank, default=None)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (-rank(finding.severity), finding.step))


def kept_findings(rows: Iterable[JsonMapping]) -> list[Finding]:
    """The rows of `findings.jsonl`: the worst of each rule, the worst first."""
    found: dict[str, Finding] = {}
    for row in rows:
        finding = Finding.from_json(row)
        if finding.rule not in found or rank(finding.severity) > rank(found[finding.rule].severity):
            found[finding.rule] = finding
    return worst_first(list(found.values()))
