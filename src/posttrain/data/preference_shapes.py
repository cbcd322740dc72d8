"""The shapes in which rows say that one answer is better than another, or that an answer is good or bad.

A shape is recognised by its columns; `docs/data.md` lists them. Independent of tokens and templates: the
output is text and messages.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from posttrain.data.chat import shared_length
from posttrain.data.conversations import as_messages, as_prompt, as_text, is_conversation, shown
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import PreferenceSpec
from posttrain.data.reward_values import NEEDED, is_reward
from posttrain.data.sources import Row
from posttrain.types import Message

TIE = "tie: neither answer is preferred"
NO_SHARED_PROMPT = "the two answers do not follow the same conversation"
NO_ANSWER = "the conversation does not end with an answer"
PREFERENCE_NOT_FINITE = f"overall_preference: {NEEDED}"
REWARD_NOT_FINITE = f"chosen_reward or rejected_reward: {NEEDED}"

ALIGNER = ("chosen_response", "rejected_response")
# What people call the rewards of the better and of the worse answer.
REWARD_COLUMNS = (
    ("chosen_reward", "rejected_reward"),
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
)
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Preference:
    """The content of a row of preference data, whatever its shape. `problem`: why it cannot be used."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    problem: str = ""
    templated: bool = False  # prompt and answers are texts as the model sees them
    chosen_reward: float | None = None  # None: the row does not say
    rejected_reward: float | None = None


@dataclass(frozen=True)
class Judgement:
    """A single answer, and whether it is desirable."""

    prompt: str | list[Message]
    response: str
    desirable: bool
    problem: str = ""
    templated: bool = False


def read_preference(row: Row, keys: PreferenceSpec) -> Preference:
    """Recognises ranked completions, HelpSteer3's two responses, NeMo-Aligner's columns, and chosen/rejected."""
    chosen_key, rejected_key = keys.chosen, keys.rejected
    if row.get(chosen_key) is None:
        if "completions" in row.values:
            return _from_ranks(row)
        if "overall_preference" in row.values:
            return _from_helpsteer(row)
        if ALIGNER[0] in row.values:
            chosen_key, rejected_key = ALIGNER
        elif keys.completion in row.values and keys.label in row.values:
            raise DataError(
                f"{row.where}: an answer on its own ({keys.completion!r} with {keys.label!r}), not a pair; "
                "dpo.preference_loss=kto learns from such rows"
            )
    chosen, rejected = row.field(chosen_key, setting="chosen_key"), row.field(rejected_key, setting="rejected_key")
    rewards = _rewards(row, keys)
    problem = "" if all(r is None or is_reward(r) for r in rewards) else REWARD_NOT_FINITE

    prompt = row.get(keys.prompt)
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        if chosen == rejected:
            return Preference("", chosen, rejected, TIE)
        transcripts = _transcript(chosen), _transcript(rejected)
        if all(transcripts):
            if any(transcript[-1]["role"] != "assistant" for transcript in transcripts):
                return Preference("", chosen, rejected, NO_ANSWER)
            chosen, rejected = transcripts
        # As TRL finds an implicit prompt: the space before the first different word is not in it.
        elif shared := chosen[: shared_length(chosen, rejected)].removesuffix(" "):
            start = len(shared)
            return Preference(shared, chosen[start:], rejected[start:], problem, True, *rewards)

    before, chosen = split_answer(chosen, row, chosen_key)
    before_rejected, rejected = split_answer(rejected, row, rejected_key)
    problem = problem or ("" if before == before_rejected else NO_SHARED_PROMPT)
    asked = _whole_prompt(row, keys.prompt, before)
    return Preference(asked, chosen, rejected, problem, _is_templated(row, keys, before, chosen_key), *rewards)


def read_judgements(row: Row, keys: PreferenceSpec) -> list[Judgement]:
    """An answer with a label; or a preference, whose better answer is wanted and whose worse one is not."""
    if row.get(keys.label) is None and keys.completion not in row.values:
        pair = read_preference(row, keys)
        if pair.problem or pair.chosen == pair.rejected:
            return [Judgement(pair.prompt, pair.chosen, True, pair.problem or TIE)]
        return [
            Judgement(pair.prompt, answer, wanted, templated=pair.templated)
            for answer, wanted in ((pair.chosen, True), (pair.rejected, False))
        ]
    before, response = split_answer(row.field(keys.completion, setting="completion_key"), row, keys.completion)
    label = row.field(keys.label, setting="label_key")
    wanted = LABELS.get(str(label).strip().lower())
    if wanted is None:
        raise DataError(f"{row.where}: {keys.label!r} must be true or false, found {shown(label)}")
    asked = _whole_prompt(row, keys.prompt, before)
    return [Judgement(asked, response, wanted, templated=_is_templated(row, keys, before, keys.completion))]


def split_answer(value: object, row: Row, key: str) -> tuple[list[Message], str]:
    """The answer, and the conversation before it when the value holds that as well."""
    if isinstance(value, dict):  # a single message
        value = [value]
    if not is_conversation(value):
        return [], as_text(value, row, key)
    messages = as_messages(value, row, key)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{row.where}: {key!r} must end with an assistant's turn, it ends with {messages[-1]['role']!r}"
        )
    return messages[:-1], messages[-1]["content"]


def _whole_prompt(row: Row, key: str, before: list[Message]) -> str | list[Message]:
    """The prompt column and the turns that stand before the answer in the answer's own column."""
    if not before:
        return as_prompt(row.field(key, setting="prompt_key"), row, key)
    stated = row.get(key)
    if not is_conversation(stated) or not stated:
        return before  # a text repeats the first question
    messages = as_messages(stated, row, key)
    return before if before[: len(messages)] == messages else [*messages, *before]


def _is_templated(row: Row, keys: PreferenceSpec, before: list[Message], answer_key: str) -> bool:
    """Text in NeMo-Aligner's columns is the text that the model sees; elsewhere it is the user's message."""
    if before or not isinstance(row.get(keys.prompt), str):
        return False
    return answer_key == ALIGNER[0] if keys.templated is None else keys.templated


def _rewards(row: Row, keys: PreferenceSpec) -> tuple[float | None, float | None]:
    named = [(keys.chosen_reward, keys.rejected_reward)] if keys.chosen_reward or keys.rejected_reward else []
    for chosen, rejected in [*named, *REWARD_COLUMNS]:
        found = [None if name is None else row.get(name) for name in (chosen, rejected)]
        if any(value is not None for value in found):
            return _number(found[0], row, chosen), _number(found[1], row, rejected)
    return None, None


def _number(value: Any, row: Row, key: str | None) -> float | None:
    if value is None:
        return value
    try:
        return float(value)  # also of a table of text, such as csv
    except OverflowError:  # a whole number beyond 1e308
        return math.inf
    except (TypeError, ValueError):
        raise DataError(f"{row.where}: {key!r} must be a number, found {shown(value)}") from None


def _from_ranks(row: Row) -> Preference:
    """`context` and `completions` with ranks, 0 the best: the best against the worst."""
    prompt = as_prompt(row.field("context"), row, "context")
    completions = row.field("completions")
    usable = is_conversation(completions) and len(completions) >= 2
    if not usable or not all("rank" in completion and "completion" in completion for completion in completions):
        raise DataError(
            f"{row.where}: 'completions' needs two records with 'rank' and 'completion', found {shown(completions)}"
        )
    ranks = [math.nan if (rank := _number(one["rank"], row, "rank")) is None else rank for one in completions]
    if any(map(math.isnan, ranks)):
        raise DataError(f"{row.where}: 'rank' must be a number, found {shown([one['rank'] for one in completions])}")
    ordered = [completion for _, completion in sorted(zip(ranks, completions, strict=True), key=itemgetter(0))]
    (_, chosen), (_, rejected) = (split_answer(ordered[end]["completion"], row, "completion") for end in (0, -1))
    return Preference(prompt, chosen, rejected, TIE if min(ranks) == max(ranks) else "")


def _from_helpsteer(row: Row) -> Preference:
    """`overall_preference`: negative where the first response is better, 0 for a tie; its size is how much."""
    prompt = as_prompt(row.field("context"), row, "context")
    first, second = (as_text(row.field(key), row, key) for key in ("response1", "response2"))
    preference = _number(row.get("overall_preference"), row, "overall_preference")
    if preference is None:
        raise DataError(f"{row.where}: 'overall_preference' is null; every row needs a value")
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return Preference(
        prompt,
        chosen,
        rejected,
        TIE if preference == 0 else "" if is_reward(preference) else PREFERENCE_NOT_FINITE,
        chosen_reward=abs(preference),
        rejected_reward=0.0,
    )


_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def _transcript(text: str) -> list[Message]:
    """The turns of "\\n\\nHuman: … \\n\\nAssistant: …", as in Anthropic's hh-rlhf; none for other texts."""
    pieces = _SPEAKER.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if pieces[0].strip() or len(pieces) < 3:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": text.strip()}
        for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
