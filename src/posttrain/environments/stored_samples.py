"""Reads stored answers for scoring: any rows with a response, a run's rollouts, labelled traces.

Columns can be named; those that are not named are looked for under the usual names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from posttrain.data.conversations import as_text
from posttrain.data.errors import DataError
from posttrain.data.reward_values import NEEDED, is_reward
from posttrain.data.sources import Row, read_local
from posttrain.files.json_files import JsonMapping
from posttrain.types import Completion, FinishReason, Message, Task

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
