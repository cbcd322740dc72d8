"""What travels to a worker process for one completion, and the failure that explains itself. No torch here."""

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


class Unscored(Exception):
    """The completion cannot be judged, and the message says why: no traceback would add to it."""
