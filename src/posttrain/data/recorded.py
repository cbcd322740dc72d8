"""Labelled traces as tasks with recorded answers, for GRPO from recorded groups.

A group becomes one task. Its traces become rollouts whose reward is known and whose sampler is not: the log-probabilities
stay empty. A trace of several turns keeps them all, and only what the model wrote is marked as trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.config.data import TRACE_GROUPS
from posttrain.data.chat import ChatFormat, is_answer
from posttrain.data.conversations import as_prompt
from posttrain.data.entries import Entry
from posttrain.data.errors import DataError
from posttrain.data.readers import DEFAULT_ENVIRONMENT, EMPTY_PROMPT, Numbered, Outcome, Read, located
from posttrain.data.sources import Row
from posttrain.data.trace_preferences import TraceRows
from posttrain.files.json_files import JsonMapping
from posttrain.types import Completion, Message, Rollout, Score, Task

if TYPE_CHECKING:
    from posttrain.data.traces import Trace, TraceGroup

TOO_FEW = "fewer than two usable answers to the prompt"
ALL_EQUAL = "all recorded rewards of the prompt are equal: nothing to learn from"


class RecordedRows(TraceRows):
    """One row per prompt, with all its traces."""

    def rows(self) -> Iterator[Row]:
        from posttrain.data.traces import iter_trace_groups

        groups = iter_trace_groups(self._path, self._columns, self._filters, report=self._read)
        for number, group in enumerate(groups, start=1):
            yield Row({"group": group}, f"groups of {self._path}", number)


class RecordedReader:
    """`needs_signal` drops groups whose rewards are all equal; fresh answers could still make a difference to them."""

    def __init__(self, entry: Entry, chat: ChatFormat, max_total_tokens: int, *, needs_signal: bool) -> None:
        if entry.prompt_is_templated:
            raise DataError(
                f"{entry.file}: prompt_is_templated = true: {TRACE_GROUPS} writes prompts with the chat template itself; give "
                "the questions without it, or set policy.tokenizer.chat_template=null, which takes texts as they are"
            )
        self._entry, self._chat, self._limit, self._needs_signal = entry, chat, max_total_tokens, needs_signal
        self._prompts = entry.prompts
        # Share one object per token value: separate objects would take four times the memory.
        self._number: dict[int, int] = {}

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Task]]:
        return [self._read(name, row) for name, row in rows]

    def _read(self, name: str, row: Row) -> Outcome[Task]:
        group: TraceGroup = row.values["group"]
        messages = self._prompts.messages(as_prompt(group.prompt, row, "prompt"))
        text, prompt_ids = located(row, self._chat.prompt, messages)
        if not prompt_ids:
            return EMPTY_PROMPT
        notes: Counter[str] = Counter()
        recorded = []
        for trace in group.traces:
            outcome = self._rollout(messages, prompt_ids, trace)
            if isinstance(outcome, str):
                notes[outcome] += 1
            else:
                recorded.append(outcome)
        if len(recorded) < 2:
            return f"{TOO_FEW} ({notes.most_common(1)[0][0]})" if notes else TOO_FEW
        if self._needs_signal and len({rollout.score.reward for rollout in recorded}) == 1:
            return ALL_EQUAL
        task = Task(
            draw=-1,
            id=group.group_id or name,
            prompt=text,
            prompt_ids=(),
            reference=group.traces[0].reference,
            environment=self._entry.env_name or DEFAULT_ENVIRONMENT,
            messages=tuple(messages),
            recorded=tuple(recorded),
        )
        return Read(task, {"prompt_ids": prompt_ids}, tuple(notes.elements()))

    def _rollout(self, messages: Sequence[Message], prompt_ids: Sequence[int], trace: Trace) -> Rollout | str:
        """The trace in tokens, or why it cannot be used."""
        mask: tuple[bool, ...] = ()
        if isinstance(trace.response, str):
            [encoded] = self._chat.split_turns([self._chat.render_turn(messages, trace.response)])
            response = encoded.response
        else:
            turns = self._turns(messages, prompt_ids, trace.response)
            if isinstance(turns, str):
                return turns
            response, mask = turns
        if len(prompt_ids) + len(response) > self._limit:
            return f"an answer left out: longer than {self._limit} tokens with its prompt"
        token_ids = tuple(self._number.setdefault(token, token) for token in response)
        completion = Completion(token_ids, (), trace.response_text, "stop", mask)
        return Rollout(completion, Score(trace.reward))

    def _turns(
        self, messages: Sequence[Message], prompt_ids: Sequence[int], response: Sequence[JsonMapping]
    ) -> tuple[list[int], tuple[bool, ...]] | str:
        """What followed the prompt, up to the last turn with text of the model, and which of its tokens are the model's."""
        turns = [{**turn, "content": turn.get("content") or ""} for turn in response]
        while turns and not is_answer(turns[-1]):
            turns.pop()
        if not turns:
            return "an answer left out: the model has no turn in it"
        if any(is_answer(message) for message in messages):
            return "an answer left out: several turns after a prompt that has answers of its own"
        try:
            text, spans = self._chat.render_conversation([*messages, *turns])
        except DataError:
            return "an answer left out: the chat template cannot write its turns"
        before, after, mask = self._chat.encode_conversation(text, spans)
        # What stands between the prompt and the first text of the model, a bare tool call and its result, is read, not trained.
        opening = before[len(prompt_ids) :]
        if list(before[: len(prompt_ids)]) != list(prompt_ids):
            return "an answer left out: the chat template writes its prompt in another way"
        return [*opening, *after], (*(False for _ in opening), *mask)
