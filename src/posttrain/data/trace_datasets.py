"""Labelled traces as data of a run: pairs for DPO, good and bad answers for KTO (`dataset_name: TracePairs`), and tasks
with recorded answers for GRPO (`TraceGroups`).

`posttrain.data.traces` reads, filters and matches traces; this module connects it to the keys of a dataset entry.

A recorded group becomes one task. Its traces become rollouts whose reward is known and whose sampler is not: the
log-probabilities stay empty. A trace of several turns keeps them all, and only what the model wrote is marked as
trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from posttrain.config.data import TRACE_GROUPS
from posttrain.data.chat import ChatFormat, is_answer
from posttrain.data.columns import DEFAULT_ENVIRONMENT
from posttrain.data.conversations import as_prompt
from posttrain.data.entries import Entry
from posttrain.data.errors import DataError
from posttrain.data.preference_shapes import ALIGNER, Judgement
from posttrain.data.readers import EMPTY_PROMPT, Numbered, Outcome, Read, located
from posttrain.data.sources import Row
from posttrain.files.json_files import JsonMapping
from posttrain.types import Completion, Message, Rollout, Score, Task

if TYPE_CHECKING:
    from posttrain.data.traces import Trace, TraceGroup

BETWEEN = "a reward between pair_rules.rejected_below and pair_rules.preferred"
SEVERAL_TURNS = "an answer of several turns"
TOO_FEW = "fewer than two usable answers to the prompt"
ALL_EQUAL = "all recorded rewards of the prompt are equal: nothing to learn from"


class TraceRows:
    """The rows of an entry of traces by its settings, and counts of what was left out."""

    def __init__(self, entry: Entry) -> None:
        from posttrain.data.traces import PairReport, PairRules, ReadReport, TraceColumns, TraceFilters

        sections = (entry.trace_columns, entry.trace_filters, entry.pair_rules)
        columns, filters, rules = ({} if section is None else section.model_dump() for section in sections)
        self._path, self._rules = entry.file, PairRules(**rules)
        self._settings = TraceColumns(**columns), TraceFilters(**filters)
        self._read, self._paired = ReadReport(), PairReport()
        self._is_templated = bool(entry.prompt_is_templated)  # otherwise the text of a trace is a user's message
        self._of_several_turns = 0

    def left_out(self) -> Mapping[str, int]:
        """Traces and prompts that gave no row, by reason; complete when all rows have been read."""
        counts: Counter[str] = Counter()
        for tallies in (self._read.problems, self._read.filtered):
            counts.update({f"trace: {reason}": tally.count for reason, tally in tallies.items()})
        counts.update({f"prompt without a pair: {reason}": count for reason, count in self._paired.none.items()})
        counts.update({f"pair: {reason}": count for reason, count in self._paired.not_writable.items()})
        if self._of_several_turns:
            counts[f"pair with {SEVERAL_TURNS}"] = self._of_several_turns
        if self._paired.over_the_cap:
            counts["pair over max_pairs_per_prompt"] = self._paired.over_the_cap
        return counts

    def pairs(self) -> Iterator[Row]:
        """Rows with a prompt, a better and a worse answer."""
        from posttrain.data.traces import iter_pair_rows

        found = iter_pair_rows(self._path, *self._settings, self._rules, report=self._read, pair_report=self._paired)
        for number, values in enumerate(found, start=1):
            # Turns of tools or users in between must not be trained, and the answers share no prompt beyond the first.
            if not all(isinstance(values[key], str) for key in ALIGNER):
                self._of_several_turns += 1
                continue
            yield Row(values, f"pairs of {self._path}", number)

    def groups(self) -> Iterator[Row]:
        """One row per prompt, with all its traces."""
        from posttrain.data.traces import iter_trace_groups

        for number, group in enumerate(iter_trace_groups(self._path, *self._settings, report=self._read), start=1):
            yield Row({"group": group}, f"groups of {self._path}", number)

    def traces(self) -> Iterator[Row]:
        """One row per trace, for `judge`."""
        found = (trace for row in self.groups() for trace in row.values["group"].traces)
        for number, trace in enumerate(found, start=1):
            yield Row({"trace": trace}, f"traces of {self._path}", number)

    def judge(self, row: Row) -> list[Judgement]:
        """Whether a trace is desirable by its reward, with the thresholds of `pair_rules`."""
        trace: Trace = row.values["trace"]
        desirable = trace.reward >= self._rules.preferred
        prompt = as_prompt(trace.prompt, row, "prompt")
        templated = self._is_templated and isinstance(prompt, str)
        if not isinstance(trace.response, str):
            return [Judgement(prompt, "", desirable, SEVERAL_TURNS)]
        between = not desirable and trace.reward >= self._rules.rejected_below
        return [Judgement(prompt, trace.response, desirable, BETWEEN if between else "", templated)]


class RecordedReader:
    """`needs_signal` drops groups whose rewards are all equal; fresh answers could still make a difference to them."""

    def __init__(self, entry: Entry, chat: ChatFormat, max_total_tokens: int, *, needs_signal: bool) -> None:
        if entry.prompt_is_templated:
            raise DataError(
                f"{entry.file}: prompt_is_templated = true: {TRACE_GROUPS} writes prompts with the chat template "
                "itself; give the questions without it, or set policy.tokenizer.chat_template=null, which takes texts "
                "as they are"
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
        """What followed the prompt, to the last turn with text of the model, and which tokens are the model's."""
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
        # What stands between the prompt and the model's first text, a tool call and its result, is not trained.
        opening = before[len(prompt_ids) :]
        if list(before[: len(prompt_ids)]) != list(prompt_ids):
            return "an answer left out: the chat template writes its prompt in another way"
        return [*opening, *after], (*(False for _ in opening), *mask)
