"""Findings of the doctor: one problem of a run, its evidence, and the setting that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from posttrain.files.json_files import JsonMapping, JsonObject

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")  # from the mildest
Shown = Literal["any", "best", "longest", "cut", "unscored", "equal"]  # which answers of the step show the problem
EARLY_STEPS = 5  # most rules look at this many
MAX_ANSWERS = 3
MAX_TEXT = 400  # characters of an answer that are kept as evidence


@dataclass(frozen=True)
class ShownAnswer:
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
    answers: tuple[ShownAnswer, ...] = ()
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
        known: JsonObject = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        known["fixes"] = tuple(row.get("fixes", ()))
        known["answers"] = tuple(ShownAnswer(**answer) for answer in row.get("answers", ()))
        return cls(**known)


def rank(severity: Severity) -> int:
    return SEVERITIES.index(severity)


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity; None without findings."""
    return max((finding.severity for finding in findings), key=rank, default=None)


def health(findings: Iterable[Finding], num_steps: int) -> str:
    """The verdict on a run: error, warning, healthy, or that it is too early to tell. The same wherever it is shown."""
    found = worst(findings)
    if found in ("error", "warning"):
        return found
    if num_steps < EARLY_STEPS:
        return f"too early to tell ({num_steps} step{'' if num_steps == 1 else 's'})"
    return "healthy"


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


def up_to_date(findings: Sequence[Finding], info: JsonMapping) -> list[Finding]:
    """`findings.jsonl` has the first step of a finding; the last one at which it held is in run.json."""
    last_steps = info.get("held_until", {})
    return [replace(one, last_step=last_steps.get(one.rule, one.last_step)) for one in findings]


def answers_that_show(groups: Sequence[JsonMapping], shown: Shown) -> tuple[ShownAnswer, ...]:
    """At most three answers. `groups` are the rows of `rollouts/step_N.jsonl.gz`."""
    if shown == "equal" and groups:
        groups = sorted(groups, key=lambda one: len({answer.get("reward") for answer in one.get("completions", ())}))[
            :1
        ]
    rollouts = [(group, answer) for group in groups for answer in group.get("completions", ())]
    if shown == "unscored":
        rollouts = [pair for pair in rollouts if pair[1].get("reward") is None]
    elif shown == "cut":
        rollouts = [pair for pair in rollouts if pair[1].get("finish_reason", "length") == "length"]
    elif shown == "longest":
        rollouts.sort(key=lambda pair: -(pair[1].get("num_tokens") or 0))
    elif shown == "best":
        rollouts.sort(key=lambda pair: -(pair[1].get("reward") or 0.0))
    return tuple(_answer(group, answer) for group, answer in rollouts[:MAX_ANSWERS])


def _answer(group: JsonMapping, answer: JsonMapping) -> ShownAnswer:
    text = str(answer.get("error") or answer.get("text") or "")
    reward, num_tokens = answer.get("reward"), answer.get("num_tokens")
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
    return ShownAnswer(
        id=str(group.get("id", "")),
        text=cut,
        reward=float(reward) if isinstance(reward, int | float) else None,
        num_tokens=int(num_tokens) if isinstance(num_tokens, int) else None,
    )
