"""Compares rewards with recorded ones and formats the result. Independent of how rewards are computed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.environments.stored_samples import StoredSample
from posttrain.files.json_files import JsonObject
from posttrain.types import Score

_MAX_VALUES_IN_TABLE = 6
_SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class Verdict:
    """One sample with its score. `part` chooses a part of the reward to compare instead of the sum."""

    sample: StoredSample
    score: Score
    tolerance: float = 1e-6
    part: str | None = None

    @property
    def reward(self) -> float | None:
        return self.score.reward if self.part is None else self.score.parts.get(self.part)

    @property
    def recorded(self) -> float | None:
        """Rollouts of a run record every part; other files record one number, which is compared with the part."""
        parts = self.sample.recorded_parts
        return parts.get(self.part) if self.part is not None and parts is not None else self.sample.recorded

    @property
    def is_compared(self) -> bool:
        return self.recorded is not None

    @property
    def agrees(self) -> bool:
        recorded = self.recorded
        return self.reward is not None and recorded is not None and abs(self.reward - recorded) <= self.tolerance

    def as_row(self) -> JsonObject:
        return {
            "where": self.sample.where,
            "reward": self.score.reward,
            "parts": dict(self.score.parts),
            "recorded": self.recorded,
            "agrees": self.agrees if self.is_compared else None,
            "error": self.score.error,
        }


def disagreements(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if v.is_compared and v.reward is not None and not v.agrees]


def unscored(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if v.reward is None]


def report(verdicts: Sequence[Verdict], seconds: float, *, num_shown: int) -> str:
    """A human-readable summary, in lines."""
    scored = [v for v in verdicts if v.reward is not None]
    per_sample = seconds / max(1, len(verdicts))
    lines = [
        f"{len(verdicts)} samples scored in {seconds:.1f} s, {per_sample:.4f} s a sample, the start of workers included"
    ]
    rewards = [v.reward for v in scored if v.reward is not None]
    if rewards:
        lines.append(f"reward: mean {statistics.fmean(rewards):.4g}, min {min(rewards):.4g}, max {max(rewards):.4g}")
    lines += _parts(verdicts)
    compared = [v for v in verdicts if v.is_compared]
    if compared:
        lines += ["", *_cross_table(compared), "", _summary(compared)]
        if len(compared) < len(verdicts):
            lines.append(f"{len(verdicts) - len(compared)} samples have no recorded reward and were not compared")
    else:
        lines += ["", "no sample has a recorded reward, so nothing was compared (name its column with --expected)"]
    differing = disagreements(verdicts)
    if differing:
        lines += ["", f"disagreements ({len(differing)}):"]
        lines += [line for verdict in differing[:num_shown] for line in _described(verdict)]
        if len(differing) > num_shown:
            lines.append(f"  … and {len(differing) - num_shown} more (--show {len(differing)})")
    failed = unscored(verdicts)
    if failed:
        lines += ["", f"unscored ({len(failed)}):"]
        if all(v.sample.task.reference is None for v in verdicts):
            lines.append("  no sample has an expected answer (name its column with --reference)")
        reasons = Counter(v.score.error or "no reason given" for v in failed)
        for reason, count in reasons.most_common(num_shown):
            first = next(v.sample.where for v in failed if (v.score.error or "no reason given") == reason)
            lines.append(f"  {count} × {reason}  (first: {first})")
        if len(reasons) > num_shown:
            lines.append(f"  … and {len(reasons) - num_shown} more reasons (--show {len(reasons)})")
    return "\n".join(lines)


def _parts(verdicts: Sequence[Verdict]) -> list[str]:
    names = dict.fromkeys(name for v in verdicts for name in v.score.parts)
    lines = []
    for name in names:
        values = [v.score.parts[name] for v in verdicts if name in v.score.parts]
        lines.append(f"  {name}: mean {statistics.fmean(values):.4g} over {len(values)}")
    return lines


def _summary(compared: Sequence[Verdict]) -> str:
    agree = sum(v.agrees for v in compared)
    failed = len(unscored(compared))
    differ = len(compared) - agree - failed
    return f"agree {agree} of {len(compared)} ({agree / len(compared):.2%}), disagree {differ}, unscored {failed}"


def _cross_table(compared: Sequence[Verdict]) -> list[str]:
    """Counts of (reward, recorded reward) pairs; for many distinct values, their differences."""
    recorded = sorted({v.recorded for v in compared if v.recorded is not None})
    rewards = sorted({v.reward for v in compared if v.reward is not None})
    if max(len(recorded), len(rewards)) > _MAX_VALUES_IN_TABLE:
        gaps = [abs(v.reward - v.recorded) for v in compared if v.reward is not None and v.recorded is not None]
        if not gaps:
            return ["none of the samples with a recorded reward could be scored"]
        return [f"distance from the recorded reward: mean {statistics.fmean(gaps):.4g}, max {max(gaps):.4g}"]
    counts = Counter((v.reward, v.recorded) for v in compared)
    heads = [f"recorded {value:g}" for value in recorded]
    rows: list[tuple[str, float | None]] = [(f"reward {value:g}", value) for value in rewards]
    if any(v.reward is None for v in compared):
        rows.append(("unscored", None))
    first = max(len(label) for label, _ in rows)
    lines = [" ".join([" " * first, *(f"{head:>14}" for head in heads)])]
    for label, reward in rows:
        lines.append(" ".join([f"{label:<{first}}", *(f"{counts[reward, value]:>14}" for value in recorded)]))
    return lines


def _described(verdict: Verdict) -> list[str]:
    sample, parts = verdict.sample, verdict.score.parts
    shown = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    response = " ".join(sample.completion.text.split())
    if len(response) > _SHOWN_CHARACTERS:
        response = "…" + response[-_SHOWN_CHARACTERS:]
    lines = [f"  {sample.where}: reward {verdict.reward:g}, recorded {verdict.recorded:g}"]
    if shown:
        lines[0] += f" ({shown})"
    if sample.task.reference is not None:
        lines.append(f"    reference: {str(sample.task.reference)[:_SHOWN_CHARACTERS]}")
    return [*lines, f"    response:  {response}"]
