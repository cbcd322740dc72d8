"""Rows to items in tokens: tasks, supervised examples, preference pairs, and answers that are judged one by one.

One reader per kind, each over a chunk of rows. A row that cannot be used is either dropped, with a reason that is
counted (too long, empty), or an error (a key is missing). Rows are never truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from posttrain.data.chat import ChatFormat, EncodedTurn, images_of, is_answer, without_images
from posttrain.data.columns import DEFAULT_ENVIRONMENT
from posttrain.data.conversations import as_messages, as_prompt, as_text
from posttrain.data.entries import Entry
from posttrain.data.errors import DataError
from posttrain.data.image_rows import placed, refuse_marks
from posttrain.data.named_datasets import PreferenceSpec, ResponseSpec
from posttrain.data.preference_shapes import TIE, Judgement, Preference, read_preference
from posttrain.data.sources import Row
from posttrain.types import Example, ImageRef, Judged, Message, Pair, Task

Item = TypeVar("Item", Task, Pair, Judged, Example)
Given = TypeVar("Given")
Made = TypeVar("Made")

EMPTY_PROMPT = "empty prompt"
MERGED = "an answer is tokenised on its own, because its first token would merge with the end of the prompt"
REVERSED = "the rejected answer has the higher reward"
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
        asked = () if callable(spec.question) else spec.question
        self._spoken_for = {*asked, *spec.solution, entry.input_key}

    def read(self, rows: Sequence[Numbered]) -> Iterator[Outcome[Task]]:
        entry, spec = self._entry, self._spec
        conversations = [
            placed(self._prompts.messages(question(row, entry, spec), system_text(row, entry, spec)), row)
            for _, row in rows
        ]
        texts = together([row for _, row in rows], self._chat.render_all, conversations)
        encoded = self._chat.encode_prompts(texts)
        for (name, row), messages, text, ids in zip(rows, conversations, texts, encoded, strict=True):
            expected = reference(row, self._entry, self._spec)
            if not ids:
                yield EMPTY_PROMPT
            elif self._limit is not None and len(ids) > self._limit:
                yield f"prompt longer than {self._limit} tokens"
            elif expected == "":
                yield NO_REFERENCE
            else:
                task = Task(
                    draw=-1,
                    id=name,
                    prompt=text,
                    prompt_ids=(),
                    reference=expected,
                    environment=self._entry.env_name or DEFAULT_ENVIRONMENT,
                    messages=tuple(without_images(messages)),
                    images=tuple(images_of(messages)),
                    metadata={name: value for name, value in row.values.items() if name not in self._spoken_for},
                )
                yield Read(task, {"prompt_ids": ids})


class ExampleReader:
    def __init__(
        self, entry: Entry, spec: ResponseSpec, chat: ChatFormat, max_total_tokens: int, only_unmask_final: bool
    ) -> None:
        self._entry, self._spec, self._chat, self._limit = entry, spec, chat, max_total_tokens
        self._only_final, self._prompts = only_unmask_final, entry.prompts

    def read(self, rows: Sequence[Numbered]) -> Iterator[Outcome[Example]]:
        conversations = [self._conversation(row) for _, row in rows]
        # Nearly all rows train a single turn: those go through the tokenizer together.
        spoken = [sum(map(is_answer, messages)) for messages in conversations]
        single = [index for index, count in enumerate(spoken) if count == 1 or (count and self._only_final)]
        asked = [(messages[:-1], messages[-1]["content"]) for messages in (conversations[index] for index in single)]
        turns = together([rows[index][1] for index in single], self._chat.render_turns, asked)
        encoded = dict(zip(single, self._chat.split_turns(turns), strict=True))

        for index, ((name, row), messages) in enumerate(zip(rows, conversations, strict=True)):
            mask: list[bool] = []
            crossed = False
            if not messages:
                yield "no assistant turn to learn from"
                continue
            if index in encoded:
                prompt, response, crossed = encoded[index]
            else:
                text, spans = located(row, self._chat.render_conversation, messages)
                prompt, response, mask = self._chat.encode_conversation(text, spans)
            if not prompt:
                yield EMPTY_PROMPT
            elif len(prompt) + len(response) > self._limit:
                yield f"longer than {self._limit} tokens"
            else:
                tokens: dict[str, Sequence[int]] = {"prompt_ids": prompt, "response_ids": response, "mask": mask}
                example = Example(-1, name, (), (), images=tuple(images_of(messages)))
                yield Read(example, tokens, (MERGED,) if crossed else ())

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
        return placed(messages[: spoken[-1] + 1], row) if spoken else []


def question(row: Row, entry: Entry, spec: ResponseSpec) -> str | list[Message]:
    if callable(spec.question) and not entry.input_key:
        return spec.question(row)
    names = (entry.input_key,) if entry.input_key else spec.question
    assert not callable(names)
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
        raise DataError(f"{row.where}: {str(error).removeprefix(f'{row.where}: ')}") from error


def together(rows: Sequence[Row], render: Callable[[list[Given]], list[Made]], given: Sequence[Given]) -> list[Made]:
    """Renders something of each row at once; one by one if the chat template refuses one, to name the row."""
    try:
        return render(list(given))
    except DataError:
        return [located(row, render, [one])[0] for row, one in zip(rows, given, strict=True)]


# -- preferences -------------------------------------------------------------------------------------------------------


_PREFERENCE_KEYS = (
    *("prompt_key", "chosen_key", "rejected_key", "chosen_reward_key", "rejected_reward_key"),
    *("completion_key", "label_key"),
)


def preference_keys(entry: Entry, spec: PreferenceSpec) -> PreferenceSpec:
    """The dataset with the columns that the entry names."""
    named = {key.removesuffix("_key"): column for key in _PREFERENCE_KEYS if (column := getattr(entry, key))}
    return replace(spec, **named, templated=entry.prompt_is_templated)


class _StatedReader:
    """What pairs and judged answers share: a prompt with an answer in tokens, and why a row is dropped."""

    def __init__(self, entry: Entry, chat: ChatFormat, max_total_tokens: int) -> None:
        self._entry, self._chat, self._limit = entry, chat, max_total_tokens

    def _encode(self, answers: Sequence[tuple[Row, Preference | Judgement, str]]) -> list[EncodedTurn]:
        """A row with a problem has no text: a template may refuse what it holds."""
        plain = [(row, one, answer) for row, one, answer in answers if not one.problem and not one.templated]
        asked = [(self._asked(row, one), answer) for row, one, answer in plain]
        rendered = iter(together([row for row, _, _ in plain], self._chat.render_turns, asked))
        turns: list[tuple[str, str]] = []
        for row, one, answer in answers:
            refuse_marks(answer, row, "an answer")
            if one.problem:
                turns.append(("", ""))
            elif one.templated:
                assert isinstance(one.prompt, str)
                if row.images:
                    raise DataError(f"{row.where}: has images, and a prompt with the chat template in it")
                turns.append(self._chat.templated_turn(one.prompt, answer))
            else:
                turns.append(next(rendered))
        return self._chat.split_turns(turns)

    def _asked(self, row: Row, one: Preference | Judgement) -> list[Message]:
        return placed(self._entry.prompts.messages(one.prompt), row)

    def _images(self, row: Row, one: Preference | Judgement) -> tuple[ImageRef, ...]:
        return tuple(images_of(self._asked(row, one))) if row.images and not one.problem else ()

    def _reason_to_drop(self, problem: str, *turns: EncodedTurn) -> str:
        if problem:
            return problem
        if not turns[0].prompt:
            return EMPTY_PROMPT
        if len(turns[0].prompt) + max(len(turn.response) for turn in turns) > self._limit:
            return f"longer than {self._limit} tokens"
        return ""


class PairReader(_StatedReader):
    def __init__(self, entry: Entry, spec: PreferenceSpec, chat: ChatFormat, max_total_tokens: int) -> None:
        super().__init__(entry, chat, max_total_tokens)
        self._keys = preference_keys(entry, spec)
        self._default_rewards = (
            1.0 if entry.default_chosen_reward is None else entry.default_chosen_reward,
            0.0 if entry.default_rejected_reward is None else entry.default_rejected_reward,
        )

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Pair]]:
        stated = [(name, row, read_preference(row, self._keys)) for name, row in rows]
        answers = [(row, one, answer) for _, row, one in stated for answer in (one.chosen, one.rejected)]
        encoded = self._encode(answers)  # together: where the prompt ends may depend on all its answers
        pairs = zip(stated, encoded[::2], encoded[1::2], strict=True)
        return [self._outcome(name, row, one, chosen, rejected) for (name, row, one), chosen, rejected in pairs]

    def _outcome(
        self, name: str, row: Row, preference: Preference, chosen: EncodedTurn, rejected: EncodedTurn
    ) -> Outcome[Pair]:
        tied = TIE if chosen.response == rejected.response else ""
        if reason := self._reason_to_drop(preference.problem or tied, chosen, rejected):
            return reason
        stated = (preference.chosen_reward, preference.rejected_reward)
        good, bad = (d if r is None else float(r) for r, d in zip(stated, self._default_rewards, strict=True))
        notes = ((MERGED,) if chosen.crossed or rejected.crossed else ()) + ((REVERSED,) if bad > good else ())
        tokens = {"prompt_ids": chosen.prompt, "chosen_ids": chosen.response, "rejected_ids": rejected.response}
        return Read(Pair(-1, name, (), (), (), good, bad, images=self._images(row, preference)), tokens, notes)


class JudgedReader(_StatedReader):
    """`judge` reads a row: the answers in it, each wanted or not."""

    def __init__(
        self, entry: Entry, chat: ChatFormat, max_total_tokens: int, judge: Callable[[Row], list[Judgement]]
    ) -> None:
        super().__init__(entry, chat, max_total_tokens)
        self._judge = judge

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Judged]]:
        judged = [(name, row, judgement) for name, row in rows for judgement in self._judge(row)]
        encoded = self._encode([(row, judgement, judgement.response) for _, row, judgement in judged])
        return [
            self._reason_to_drop(judgement.problem, turn)
            or Read(
                Judged(-1, name, (), (), judgement.desirable, self._images(row, judgement)),
                {"prompt_ids": turn.prompt, "response_ids": turn.response},
                (MERGED,) if turn.crossed else (),
            )
            for (name, row, judgement), turn in zip(judged, encoded, strict=True)
        ]
