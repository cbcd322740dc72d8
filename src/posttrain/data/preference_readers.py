"""Preference rows to items in tokens: pairs, and answers that are judged one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.data.chat import ChatFormat, EncodedTurn
from posttrain.data.entries import Entry
from posttrain.data.named_datasets import PreferenceSpec
from posttrain.data.preference_shapes import (
    TIE,
    Judgement,
    Preference,
    PreferenceKeys,
    read_judgements,
    read_preference,
)
from posttrain.data.readers import EMPTY_PROMPT, MERGED, Numbered, Outcome, Read, located
from posttrain.data.sources import Row
from posttrain.types import Judged, Message, Pair

REVERSED = "the rejected answer has the higher reward"

ReadJudgements = Callable[[Row], list[Judgement]]


def preference_keys(entry: Entry, spec: PreferenceSpec) -> PreferenceKeys:
    return PreferenceKeys(
        prompt=entry.prompt_key or spec.prompt,
        chosen=entry.chosen_key or spec.chosen,
        rejected=entry.rejected_key or spec.rejected,
        chosen_reward=entry.chosen_reward_key,
        rejected_reward=entry.rejected_reward_key,
        completion=entry.completion_key or "completion",
        label=entry.label_key or "label",
        templated=entry.prompt_is_templated,
    )


@dataclass(frozen=True)
class AnswerWriter:
    """A prompt and an answer as the two texts that are tokenised."""

    entry: Entry
    chat: ChatFormat

    def turn(self, row: Row, prompt: str | list[Message], answer: str, templated: bool) -> tuple[str, str]:
        if templated:
            assert isinstance(prompt, str)
            return self.chat.templated_turn(prompt, answer)
        return located(row, self.chat.render_turn, self.entry.prompts.messages(prompt), answer)


class PairReader:
    def __init__(self, entry: Entry, spec: PreferenceSpec, chat: ChatFormat, max_total_tokens: int) -> None:
        self._keys = preference_keys(entry, spec)
        self._chat, self._limit = chat, max_total_tokens
        self._writer = AnswerWriter(entry, chat)
        self._default_rewards = (
            1.0 if entry.default_chosen_reward is None else entry.default_chosen_reward,
            0.0 if entry.default_rejected_reward is None else entry.default_rejected_reward,
        )

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Pair]]:
        preferences = [read_preference(row, self._keys) for _, row in rows]
        turns: list[tuple[str, str]] = []
        for (_, row), preference in zip(rows, preferences, strict=True):
            for answer in (preference.chosen, preference.rejected):
                # A row with a problem is not written: a template may refuse what it holds.
                turns.append(
                    ("", "")
                    if preference.problem
                    else self._writer.turn(row, preference.prompt, answer, preference.templated)
                )
        encoded = self._chat.split_turns(turns)
        return [
            self._outcome(name, preference, encoded[2 * index], encoded[2 * index + 1])
            for index, ((name, _), preference) in enumerate(zip(rows, preferences, strict=True))
        ]

    def _outcome(self, name: str, preference: Preference, chosen: EncodedTurn, rejected: EncodedTurn) -> Outcome[Pair]:
        if preference.problem:
            return preference.problem
        if chosen.response == rejected.response:
            return TIE
        if not chosen.prompt:
            return EMPTY_PROMPT
        if len(chosen.prompt) + max(len(chosen.response), len(rejected.response)) > self._limit:
            return f"longer than {self._limit} tokens"
        stated = (preference.chosen_reward, preference.rejected_reward)
        good, bad = (d if r is None else float(r) for r, d in zip(stated, self._default_rewards, strict=True))
        notes = ((MERGED,) if chosen.crossed or rejected.crossed else ()) + ((REVERSED,) if bad > good else ())
        tokens = {
            "prompt_ids": chosen.prompt,
            "chosen_ids": chosen.response,
            "rejected_ids": rejected.response,
        }
        return Read(Pair(-1, name, (), (), (), good, bad), tokens, notes)


class JudgedReader:
    """`judge` reads a row: the answers in it, each wanted or not."""

    def __init__(self, entry: Entry, chat: ChatFormat, max_total_tokens: int, judge: ReadJudgements) -> None:
        self._chat, self._limit, self._judge = chat, max_total_tokens, judge
        self._writer = AnswerWriter(entry, chat)

    @classmethod
    def of_columns(cls, entry: Entry, spec: PreferenceSpec, chat: ChatFormat, max_total_tokens: int) -> JudgedReader:
        keys = preference_keys(entry, spec)
        return cls(entry, chat, max_total_tokens, lambda row: read_judgements(row, keys))

    def read(self, rows: Sequence[Numbered]) -> list[Outcome[Judged]]:
        judged = [(name, row, judgement) for name, row in rows for judgement in self._judge(row)]
        encoded = self._chat.split_turns(
            [
                ("", "")
                if judgement.problem
                else self._writer.turn(row, judgement.prompt, judgement.response, judgement.templated)
                for _, row, judgement in judged
            ]
        )
        return [
            self._outcome(name, judgement, turn) for (name, _, judgement), turn in zip(judged, encoded, strict=True)
        ]

    def _outcome(self, name: str, judgement: Judgement, turn: EncodedTurn) -> Outcome[Judged]:
        if judgement.problem:
            return judgement.problem
        if not turn.prompt:
            return EMPTY_PROMPT
        if len(turn.prompt) + len(turn.response) > self._limit:
            return f"longer than {self._limit} tokens"
        tokens = {"prompt_ids": turn.prompt, "response_ids": turn.response}
        return Read(Judged(-1, name, (), (), judgement.desirable), tokens, (MERGED,) if turn.crossed else ())
