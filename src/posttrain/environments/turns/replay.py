"""State that lives in another process, as a value: how it began, and what was done in it since.

A worker keeps open the states that it reached last. Where it has not (another worker, one that was replaced, a resumed
run) it begins anew and repeats the actions. Each must have the result that it had before, or the rollout is unscored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.environments.item import Unscored
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonMapping, JsonObject

_ROOM_LIMIT_S = 2.0


class NoRoom(Unscored):
    """No instance can be begun as long as others are open."""


class LiveState(Protocol):
    def act(self, action: JsonMapping) -> JsonObject:
        """Its result, without what differs from one repetition to the next."""
        ...

    def close(self) -> None: ...

    @property
    def is_open(self) -> bool:
        """False once its process has ended, perhaps in the call of another."""
        ...


@dataclass
class History:
    """Equal histories are equal states. Travels with the conversation."""

    start: JsonMapping = field(default_factory=dict)
    actions: list[tuple[str, str]] = field(default_factory=list)  # each as JSON, with the digest of its result


class LiveStates:
    """The open states of a worker, least recently used first."""

    def __init__(self, begin: Callable[[JsonMapping], LiveState], max_open: int) -> None:
        self._begin, self._max_open = begin, max_open
        self._open: list[tuple[History, LiveState]] = []

    def act(self, history: History, action: JsonMapping) -> JsonObject:
        """The result; `history` then includes the action. After an error nothing of that state stays open."""
        state = self._taken(history) or self._replayed(history)
        try:
            result = state.act(action)
        except BaseException:
            _close(state)
            raise
        history.actions.append((json.dumps(action), digest(result)))
        self._open.append((History(history.start, list(history.actions)), state))
        if len(self._open) > self._max_open:
            _close(self._open.pop(0)[1])
        return result

    def release(self, history: History) -> None:
        """The conversation has ended."""
        if (state := self._taken(history)) is not None:
            _close(state)

    def _taken(self, history: History) -> LiveState | None:
        self._open = [(reached, state) for reached, state in self._open if state.is_open]
        for place, (reached, _) in enumerate(self._open):
            if reached == history:
                return self._open.pop(place)[1]
        return None

    def _begun(self, start: JsonMapping) -> LiveState:
        give_up_at = 0.0
        while True:
            try:
                return self._begin(start)
            except NoRoom:
                if self._open:
                    _close(self._open.pop(0)[1])
                    give_up_at = time.monotonic() + _ROOM_LIMIT_S
                elif time.monotonic() > give_up_at:
                    raise
                time.sleep(0.02)  # what was closed may need a moment

    def _replayed(self, history: History) -> LiveState:
        state = self._begun(history.start)
        try:
            for turn, (action, before) in enumerate(history.actions, start=1):
                if digest(state.act(json.loads(action))) != before:
                    raise Unscored(
                        f"the environment does not repeat itself: action {turn} of {len(history.actions)} had another "
                        "result when it was sent again to a fresh instance"
                    )
        except BaseException:
            _close(state)
            raise
        return state


def _close(state: LiveState) -> None:
    """One that does not close takes nothing from the rollout that is answered: what it gave is known."""
    with suppress(Exception):
        state.close()
