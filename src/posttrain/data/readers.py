"""Rows to items in tokens: tasks and supervised examples. One reader per kind, each over a chunk of rows.

A row that cannot be used is either dropped, with a reason that is counted (too long, empty), or an error (a key is
missing). Rows are never truncated. Preferences are read in `preference_readers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from posttrain.data.chat import ChatFormat, is_answer
from posttrain.data.conversations import as_messages, as_prompt, as_text
from posttrain.data.entries import Entry
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import ResponseSpec
from posttrain.data.sources import Row
from posttrain.types import Example, Judged, Message, Pair, Task

Item = TypeVar("Item", Task, Pair, Judged, Example)
Made = TypeVar("Made")

DEFAULT_ENVIRONMENT = "math"
EMPTY_PROMPT = "empty prompt"
MERGED = "an answer is tokenised on its own, because its first token would merge with the end of the prompt"
NO_REFERENCE = 'empty answer (output_key: "" if none is needed)'


@dataclass(frozen=True)
class Read(Generic[Item]):
    """An item without its tokens, and the tokens by the name of the item's field."""

    item: Item
    tokens: Mapping[str, Sequence[int]]
    notes: tuple[str, ...] = ()  # remark on a row that is used; counted like dropped rows


Outcome = Read[Item] | str  # a text is the reason why the row was dropped
Numbered = tuple[str, Row]  # the identity of the row, for people, and the row


class TaskReader:
    def __init__(self, entry: Entry, spec: ResponseSpec, chat: ChatFormat, max_prompt_tokens: int | None) -> None:
        self._entry, self._spec, self._chat, self._limit = entry, spec, chat, max_prompt_tokens
        self._prompts = entry.prompts
        # Other columns are passed to reward functions; the answer too, under its own name.
        self._spoken_for = {*spec.question, *spec.solution, entry.input_key}

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Task]]:
        conversations = [self._messages(row) for _, row in rows]
        texts = [
            located(row, self._chat.render, messages) for (_, row), messages in zip(rows, conversations, strict=True)
        ]
        outcomes: list[Outcome[Task]] = []
        for (name, row), messages, text, ids in zip(
            rows, conversations, texts, self._chat.encode_prompts(texts), strict=True
        ):
            expected = reference(row, self._entry, self._spec)
            if not ids:
                outcomes.append(EMPTY_PROMPT)
            elif self._limit is not None and len(ids) > self._limit:
                outcomes.append(f"prompt longer than {self._limit} tokens")
            elif expected == "":
                outcomes.append(NO_REFERENCE)
            else:
                task = Task(
                    draw=-1,
                    id=name,
                    prompt=text,
                    prompt_ids=(),
                    reference=expected,
                    environment=self._entry.env_name or DEFAULT_ENVIRONMENT,
                    messages=tuple(messages),
                    metadata={name: value for name, value in row.values.items() if name not in self._spoken_for},
                )
                outcomes.append(Read(task, {"prompt_ids": ids}))
        return outcomes

    def _messages(self, row: Row) -> list[Message]:
        system = system_text(row, self._entry, self._spec)
        return self._prompts.messages(question(row, self._entry, self._spec), system)


class ExampleReader:
    def __init__(
        self, entry: Entry, spec: ResponseSpec, chat: ChatFormat, max_total_tokens: int, only_unmask_final: bool
    ) -> None:
        self._entry, self._spec, self._chat, self._limit = entry, spec, chat, max_total_tokens
        self._only_final, self._prompts = only_unmask_final, entry.prompts

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Example]]:
        conversations = [self._conversation(row) for _, row in rows]
        # Nearly all rows train a single turn: those go through the tokenizer together.
        single = [index for index, messages in enumerate(conversations) if self._trains_one_turn(messages)]
        turns = [self._turn(rows[index][1], conversations[index]) for index in single]
        encoded = dict(zip(single, self._chat.split_turns(turns), strict=True))

        outcomes: list[Outcome[Example]] = []
        for index, ((name, row), messages) in enumerate(zip(rows, conversations, strict=True)):
            mask: list[bool] = []
            crossed = False
            if not messages:
                outcomes.append("no assistant turn to learn from")
                continue
            if index in encoded:
                prompt, response, crossed = encoded[index]
            else:
                text, spans = located(row, self._chat.render_conversation, messages)
                prompt, response, mask = self._chat.encode_conversation(text, spans)
            if not prompt:
                outcomes.append(EMPTY_PROMPT)
            elif len(prompt) + len(response) > self._limit:
                outcomes.append(f"longer than {self._limit} tokens")
            else:
                tokens: dict[str, Sequence[int]] = {"prompt_ids": prompt, "response_ids": response, "mask": mask}
                outcomes.append(Read(Example(-1, name, (), ()), tokens, (MERGED,) if crossed else ()))
        return outcomes

    def _conversation(self, row: Row) -> list[Message]:
        """The turns up to the last answer; none if the assistant has no turn."""
        entry, spec = self._entry, self._spec
        keys = (entry.chat_key,) if entry.chat_key else spec.conversation
        key = next((key for key in keys if key in row.values), entry.chat_key)
        system = system_text(row, entry, spec)
        if key and not entry.input_key:
            turns = as_messages(row.field(key, setting="chat_key"), row, key)
            messages = self._prompts.messages(turns, system)
        else:
            asked = self._prompts.messages(question(row, entry, spec), system)
            messages = [*asked, {"role": "assistant", "content": solution(row, entry, spec)}]
        spoken = [index for index, message in enumerate(messages) if is_answer(message)]
        return messages[: spoken[-1] + 1] if spoken else []

    def _trains_one_turn(self, messages: Sequence[Message]) -> bool:
        spoken = sum(is_answer(message) for message in messages)
        return spoken == 1 or (spoken > 1 and self._only_final)

    def _turn(self, row: Row, messages: Sequence[Message]) -> tuple[str, str]:
        return located(row, self._chat.render_turn, messages[:-1], messages[-1]["content"])


def question(row: Row, entry: Entry, spec: ResponseSpec) -> str | list[Message]:
    names = (entry.input_key,) if entry.input_key else spec.question
    return as_prompt(row.field(*names, setting="input_key"), row, names[0])


def system_text(row: Row, entry: Entry, spec: ResponseSpec) -> str:
    """The row's own system message, where it has a column for that."""
    key = entry.system_key or spec.system
    text = row.get(key) if key else None
    return as_text(text, row, key) if text and key else ""


def reference(row: Row, entry: Entry, spec: ResponseSpec) -> Any:
    """The reference of an answer. `output_key: ""`: no reference, and the environment needs none."""
    if entry.output_key == "":
        return None
    if entry.output_key is None and callable(spec.answer):
        return spec.answer(row)
    names = (entry.output_key,) if entry.output_key else spec.answer
    assert not callable(names)
    value = row.field(*names, setting="output_key")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value is None or isinstance(value, float):
        as_text(value, row, names[0])  # refuses null, NaN and infinity
    return value


def solution(row: Row, entry: Entry, spec: ResponseSpec) -> str:
    """What a supervised model should write: the worked solution where there is one, otherwise the answer."""
    if not entry.output_key:
        for name in spec.solution:
            worked = row.get(name)
            if worked is not None:
                return as_text(worked, row, name)
    return as_text(reference(row, entry, spec), row, entry.output_key or "output")


def located(row: Row, render: Callable[..., Made], *arguments: object) -> Made:
    """Adds the row's location to errors of the chat template."""
    try:
        return render(*arguments)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
