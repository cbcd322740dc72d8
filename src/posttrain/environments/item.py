"""Messages to and from a worker for one completion: the item, and a reward or an error. Does not import torch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from posttrain.data.reward_values import NEEDED, is_reward, total
from posttrain.files.json_files import JsonMapping, JsonObject

WORKER_MARK = "POSTTRAIN_WORKER"  # variable in the environment of a worker and of what it starts


def text_of(content: object) -> str:
    """The content of a message for people and judges; `<image>` stands for an image part."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "<image>")) if isinstance(part, dict) else str(part) for part in content)


@dataclass(frozen=True)
class ScoringItem:
    """One completion with the data needed to score it."""

    prompt: str  # the model's input, chat template applied
    response: str
    reference: Any
    messages: list[JsonObject] = field(default_factory=list)  # the conversation before the chat template
    metadata: JsonMapping = field(default_factory=dict)
    noise_key: str = ""  # seeds `random` for this call, so that a noisy reward does not depend on the worker it ran in
    token_ids: tuple[int, ...] | None = None  # the model's own tokens, stop token included; None: not known
    finish_reason: str = ""  # "stop", or "length" for an answer that was cut off; empty: not known

    @property
    def question(self) -> Any:
        """The user's last message, which need not be text; the whole prompt if there is none."""
        asked = [message.get("content", "") for message in self.messages if message.get("role") == "user"]
        return asked[-1] if asked else self.prompt

    @property
    def num_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True)
class PlainReply:
    """A worker's answer to calls other than scoring; passed through unchanged."""

    fields: JsonObject  # plain JSON values


class Unscored(Exception):
    """The completion cannot be scored. The message gives the reason; no traceback is needed."""


class BadSetup(Exception):
    """No completion can be scored with these settings. The message names what to change."""


def encodable(text: str) -> str:
    """Without lone surrogates, which sampled text may contain and tokenizers, files and requests cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def to_reward(value: object) -> tuple[float, dict[str, float]]:
    """A number is the reward. A dict is named parts: their sum is the reward, unless one of them is called `reward`."""
    if not isinstance(value, Mapping):
        return _to_number(value, "the reward function returned"), {}
    parts = {
        str(name): _to_number(part, f"the reward function returned part {name!r} =") for name, part in value.items()
    }
    if not parts:
        raise Unscored("the reward function returned an empty dict: named numbers are needed")
    if "reward" in parts:
        return parts.pop("reward"), parts
    return _usable(total(parts.values()), "the parts of the reward add up to"), parts


def _to_number(value: Any, what: str) -> float:
    # numpy and torch scalars and one-element arrays convert to a Python number.
    if not isinstance(value, (numbers.Number, str, bytes)) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except Exception:
            raise Unscored(f"{what} {_describe(value)}: a single number is needed") from None
    if not isinstance(value, (numbers.Real, Decimal)):
        raise Unscored(f"{what} {_describe(value)}: a number, or a dict of named numbers, is needed")
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        raise Unscored(f"{what} a number that does not fit a float: {error}") from None
    return _usable(number, what)


def _usable(number: float, what: str) -> float:
    if not is_reward(number):
        raise Unscored(f"{what} {number}: {NEEDED}")
    return number


def _describe(value: object) -> str:
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:
        text = "<no repr>"
    return f"{text[:80]} ({type(value).__name__})"
