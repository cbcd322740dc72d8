"""What travels between the driver and the workers of an environment that takes turns. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.environments.turns.interface import EndReason, TurnTask

Request = Literal["describe", "reset", "step", "end"]


@dataclass(frozen=True)
class TurnItem:
    """One call. The state stays pickled: only workers know the classes in it."""

    request: Request
    noise_key: str = ""  # seeds `random` for this call
    task: TurnTask | None = None  # of reset
    state: bytes = b""  # of step and end
    response: str = ""  # of step
    reason: EndReason = "turns"  # of end
