"""What travels to a worker process for one completion, and the failures that explain themselves. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoringItem:
    """One completion with what is needed to judge it."""

    prompt: str  # as the model saw it, chat template applied
    response: str
    reference: Any
    messages: list[dict[str, Any]] = field(default_factory=list)  # the conversation before the chat template
    metadata: Mapping[str, Any] = field(default_factory=dict)
    noise_key: str = ""  # seeds `random` for this call, so that a noisy reward does not depend on the worker it ran in
    token_ids: tuple[int, ...] | None = None  # the model's own tokens, stop token included; None: not known
    finish_reason: str = ""  # "stop", or "length" for an answer that was cut off; empty: not known

    @property
    def num_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True)
class PlainReply:
    """What a worker answers when it is not asked for a reward: sent as it is."""

    fields: dict[str, Any]  # plain JSON values


class Unscored(Exception):
    """The completion cannot be judged, and the message says why: no traceback would add to it."""


class BadSetup(Exception):
    """No completion can be judged with these settings, and the message says what to change."""
