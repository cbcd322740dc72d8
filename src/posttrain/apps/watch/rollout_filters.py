"""Which groups a reader asks for: limits of rewards, lengths and reward parts, how answers ended, and text that they
contain.

A group is shown if one of its answers has everything that is asked of an answer; those answers are marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.files.json_files import JsonObject

SNIPPET_BEFORE, SNIPPET_AFTER = 60, 140  # characters around a hit
PREVIEW = 240  # characters of a prompt
_TEMPLATE_MARK = re.compile(
    r"<\|[^|<>]{1,40}\|>(?:(?:system|user|assistant|tool)\n)?|</?s>|\[/?INST\]"
    r"|<(?:start|end)_of_turn>(?:(?:user|model)\n)?"
)
_ROLES = ("system", "user", "assistant", "model", "tool", "<think>", "</think>")


@dataclass(frozen=True)
class Range:
    low: float | None = None
    high: float | None = None

    @property
    def is_set(self) -> bool:
        return self.low is not None or self.high is not None

    def hold(self, value: object) -> bool:
        if not self.is_set:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Filters:
    text: str = ""  # in the prompt, the answer or one of its turns; upper and lower case are the same
    task: str = ""  # id of the task, exactly
    reward: Range = Range()
    spread: Range = Range()  # highest minus lowest reward of the group
    length: Range = Range()  # tokens of the answer
    part: str = ""  # name of a reward part
    part_value: Range = Range()
    finish: str = ""  # "stop" or "length"
    error: bool | None = None  # True: unscored

    @property
    def asks_of_answers(self) -> bool:
        limits = (self.reward, self.length, self.part_value)
        return bool(
            self.text or self.part or self.finish or self.error is not None or any(one.is_set for one in limits)
        )

    def may_match(self, line: bytes) -> bool:
        """Whether the line of a group can match, from its bytes: most lines need not be parsed."""
        words = json.dumps(self.text or self.task, ensure_ascii=False)[1:-1].lower()
        if words.isascii():
            return words.encode() in line.lower()
        return words in line.decode("utf-8", "replace").lower()

    def matching(self, group: JsonObject) -> list[int] | None:
        """The requested answers; None if the group is not shown."""
        if self.task and group.get("id") != self.task:
            return None
        answers = group.get("completions") or []
        if self.spread.is_set and not self.spread.hold(spread_of(answers)):
            return None
        if not self.asks_of_answers:
            return list(range(len(answers)))
        in_prompt = bool(self.text) and self.text.lower() in str(group.get("prompt", "")).lower()
        found = [index for index, answer in enumerate(answers) if self._wants(answer, in_prompt)]
        return found or None

    def _wants(self, answer: Mapping[str, object], in_prompt: bool) -> bool:
        if not (self.reward.hold(answer.get("reward")) and self.length.hold(answer.get("num_tokens"))):
            return False
        if self.finish and answer.get("finish_reason") != self.finish:
            return False
        if self.error is not None and self.error != bool(answer.get("error")):
            return False
        if self.part:
            parts = answer.get("parts")
            if not isinstance(parts, dict) or self.part not in parts or not self.part_value.hold(parts[self.part]):
                return False
        return not self.text or in_prompt or self.text.lower() in answer_text(answer).lower()


def answer_text(answer: Mapping[str, object]) -> str:
    turns = answer.get("turns")
    if isinstance(turns, list):
        return "\n".join(str(turn.get("text", "")) for turn in turns if isinstance(turn, dict))
    return str(answer.get("text", ""))


def spread_of(answers: list[JsonObject]) -> float | None:
    rewards = [answer["reward"] for answer in answers if isinstance(answer.get("reward"), int | float)]
    return max(rewards) - min(rewards) if rewards else None


def summary(group: JsonObject, index: int, matching: list[int], text: str = "") -> JsonObject:
    """A group as one row of a list."""
    answers = group.get("completions") or []
    rewards = [answer.get("reward") for answer in answers]
    scored = [reward for reward in rewards if isinstance(reward, int | float)]
    lengths = [answer.get("num_tokens") or 0 for answer in answers]
    prompt = str(group.get("prompt", ""))
    shown = asked(prompt)
    return {
        "index": index,
        "id": str(group.get("id", "")),
        "draw": group.get("draw"),
        "prompt": shown[:PREVIEW] + ("…" if len(shown) > PREVIEW else ""),
        "rewards": rewards,
        "mean": sum(scored) / len(scored) if scored else None,
        "spread": max(scored) - min(scored) if scored else None,
        "lengths": lengths,
        "mean_length": sum(lengths) / len(lengths) if lengths else None,
        "num_cut": sum(answer.get("finish_reason") == "length" for answer in answers),
        "num_errors": sum(bool(answer.get("error")) for answer in answers),
        "num_turns": max((len(answer.get("turns") or ()) for answer in answers), default=0),
        "matching": matching,
        "snippet": _snippet(answers, matching, prompt, text) if text else "",
    }


def asked(prompt: str) -> str:
    """The last message of a rendered prompt, without the marks of its chat template."""
    parts = (part.strip() for part in _TEMPLATE_MARK.split(prompt))
    return next((part for part in reversed(list(parts)) if part and part not in _ROLES), prompt)


def _snippet(answers: list[JsonObject], matching: list[int], prompt: str, text: str) -> str:
    for whole in (*(answer_text(answers[index]) for index in matching), prompt):
        place = whole.lower().find(text.lower())
        if place >= 0:
            start, end = max(0, place - SNIPPET_BEFORE), place + len(text) + SNIPPET_AFTER
            return ("…" if start else "") + whole[start:end] + ("…" if end < len(whole) else "")
    return ""
