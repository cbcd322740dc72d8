"""Stored answers (rows with a response, rollouts, traces), and how their rewards agree with recorded ones.

Columns can be named; those that are not named are looked for under the usual names. Independent of how rewards are
computed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from posttrain.data.conversations import as_text
from posttrain.data.errors import DataError
from posttrain.data.reward_values import NEEDED, is_reward
from posttrain.data.sources import Row, read_local
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.types import Completion, FinishReason, Message, Score, Task

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
    for name in dict.fromkeys(name for v in verdicts for name in v.score.parts):
        values = [v.score.parts[name] for v in verdicts if name in v.score.parts]
        lines.append(f"  {name}: mean {statistics.fmean(values):.4g} over {len(values)}")
    compared = [v for v in verdicts if v.is_compared]
    if compared:
        agree, failing = sum(v.agrees for v in compared), len(unscored(compared))
        counts = f"disagree {len(compared) - agree - failing}, unscored {failing}"
        lines += ["", *_cross_table(compared), ""]
        lines.append(f"agree {agree} of {len(compared)} ({agree / len(compared):.2%}), {counts}")
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


# -- reading -----------------------------------------------------------------------------------------------------------


USUAL_NAMES = {
    "prompt": ("prompt", "input", "question", "problem"),
    "response": ("response", "completion", "output"),
    "reference": ("reference", "reference_answer", "expected_answer", "ground_truth", "gold"),
    "expected": ("expected_reward", "final_reward", "reward", "label", "expected"),
}


@dataclass(frozen=True)
class Columns:
    """Names of columns; None: the first of the usual ones that a row has."""

    prompt: str | None = None
    response: str | None = None
    reference: str | None = None
    expected: str | None = None

    def of(self, row: Row, meaning: str) -> object:
        """The value, None if the row has none. A column that was asked for by name must be there."""
        chosen = getattr(self, meaning)
        if chosen is not None:
            return row.field(chosen, setting=f"--{meaning}") if chosen not in row.values else row.values[chosen]
        return next((row.values[name] for name in USUAL_NAMES[meaning] if name in row.values), None)


@dataclass(frozen=True)
class StoredSample:
    """One stored answer, and the reward that was recorded for it if there is one."""

    where: str
    task: Task
    completion: Completion
    recorded: float | None = None
    recorded_parts: Mapping[str, float] | None = None  # None: the file does not have them
    row_settings: JsonMapping = field(default_factory=dict)  # settings of the reward that the row itself gives


def read_samples(
    path: str,
    columns: Columns,
    *,
    row_settings: Sequence[str] = (),
    limit: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[StoredSample]:
    """The samples of a file. `encode` gives the tokens of a response, which files rarely have."""
    found = _samples(path, columns, tuple(row_settings), encode)
    return list(found if limit is None else islice(found, limit))


def _samples(
    path: str, columns: Columns, row_settings: tuple[str, ...], encode: Callable[[str], Sequence[int]] | None
) -> Iterator[StoredSample]:
    number = 0
    for row in read_local(path):
        settings = {name: row.field(name, setting="--row-settings") for name in row_settings}
        for where, answer, recorded, parts, finish_reason in _answers(row, columns):
            tokens = tuple(encode(answer)) if encode is not None else ()
            messages = _prompt_messages(row, columns)
            task = Task(
                draw=number,
                id=where,
                prompt="\n\n".join(str(message.get("content") or "") for message in messages),
                prompt_ids=(),
                reference=_reference(row, columns),
                messages=tuple(messages),
                metadata=row.values,
            )
            completion = Completion(tokens, (0.0,) * len(tokens), answer, finish_reason)
            yield StoredSample(where, task, completion, _recorded(recorded, where), parts, settings)
            number += 1


def _answers(row: Row, columns: Columns) -> Iterator[tuple[str, str, object, Mapping[str, float] | None, FinishReason]]:
    """(where, text, recorded reward, its parts, how it ended) for every answer of a row."""
    completions = row.values.get("completions")
    if columns.response is None and isinstance(completions, list):  # rollouts/step_N.jsonl.gz
        for number, completion in enumerate(completions, start=1):
            reason = "length" if completion.get("finish_reason") == "length" else "stop"
            where = f"{row.where}, completion {number}"
            recorded = completion.get(columns.expected or "reward")
            parts = {name: value for name, value in (completion.get("parts") or {}).items() if value is not None}
            yield where, _text(completion.get("text"), row), recorded, parts or None, cast(FinishReason, reason)
        return
    if columns.response is None and _is_trace(row):
        answer: Any = row.values["messages"][row.values["prompt_len"] :]
    else:
        answer = columns.of(row, "response")
        if answer is None:
            row.field(*USUAL_NAMES["response"], setting="--response")
    yield row.where, _text(answer, row), columns.of(row, "expected"), None, "stop"


def _is_trace(row: Row) -> bool:
    return isinstance(row.values.get("messages"), list) and isinstance(row.values.get("prompt_len"), int)


def _prompt_messages(row: Row, columns: Columns) -> list[Message]:
    """The conversation before the answer; a prompt that is text is one message of the user."""
    prompt = columns.of(row, "prompt")
    if prompt is None and _is_trace(row):
        prompt = row.values["messages"][: row.values["prompt_len"]]
    if prompt is None:
        return []
    if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
        return [dict(message) for message in prompt]
    return [{"role": "user", "content": as_text(prompt, row, "prompt")}]


def _reference(row: Row, columns: Columns) -> object:
    value = columns.of(row, "reference")
    if isinstance(value, float):
        as_text(value, row, "reference")  # refuses NaN and infinity
    return value


def _text(answer: object, row: Row) -> str:
    """The response as text: of a conversation, the text of the assistant."""
    if isinstance(answer, list) and all(isinstance(message, Mapping) for message in answer):
        spoken = [message.get("content") for message in answer if message.get("role", "assistant") == "assistant"]
        return "\n\n".join(str(content) for content in spoken if content)
    return as_text(answer, row, "response")


def _recorded(value: object, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not is_reward(value):
        raise DataError(f"{where}: the recorded reward is {value!r:.80}: true, false or {NEEDED}")
    return float(value)
