"""The engine's end of a server: the only code that touches the models. It steps the sessions in turn.

Requests and cancellations arrive through a channel; the tokens of a step leave in one message. `engine_host.py` runs
it in a process or a thread, `engine_client.py` is the other end. One loop for all sessions, because only one forward
pass may run at a time in a process.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from posttrain.apps.serve.channel import EngineChannel
from posttrain.engines.native.session import FailureEvent, GenerationSession, SessionCounts, SessionRequest, TokenEvent

# A session whose steps keep failing is marked as broken: the GPU is lost, or the weights cannot run. An adapter that
# keeps producing NaN is marked alone: its weights do not affect the others.
_MOST_FAILURES_IN_A_ROW = 3

log = logging.getLogger("posttrain.serve")


class AddRequests(NamedTuple):
    """Requests of one client: in one message, so that their prompts are always computed together."""

    session: int
    requests: tuple[SessionRequest, ...]


class Cancel(NamedTuple):
    """The request takes part in no further step. Finished and unknown requests are ignored."""

    session: int
    request_id: str


class StopEngine(NamedTuple):
    """End after the current step. Unfinished requests are dropped."""


class EngineReport(NamedTuple):
    """The results of a step. Tokens are plain tuples of `TokenEvent`: a step has hundreds, and pickle is ten times as
    fast.
    """

    tokens: Sequence[tuple[object, ...]]
    failures: list[tuple[str, str]]  # request, message
    counts: list[SessionCounts]  # by session
    broken: set[tuple[int, str | None]]  # sessions with an adapter, or whole: None


class EngineLoop:
    def __init__(self, sessions: Sequence[GenerationSession], channel: EngineChannel) -> None:
        self.sessions = list(sessions)
        self._channel = channel
        self._adapters: dict[str, str] = {}  # by unfinished request
        self._num_failures: Counter[tuple[int, str | None]] = Counter()  # steps in a row; None: the step itself failed
        self._tokens: list[TokenEvent] = []
        self._failures: list[tuple[str, str]] = []
        self._counts: list[SessionCounts] = []  # as last reported
        self._running = True

    def run(self) -> None:
        """Run until `StopEngine`, or until the other end is closed."""
        try:
            while self._running:
                self._handle_messages()
                for index, session in enumerate(self.sessions):
                    if session.unfinished:
                        self._step(index, session)
                self._report()
        except ConnectionError:
            pass
        finally:
            self._channel.close()

    def _handle_messages(self) -> None:
        """All messages that have arrived; when no request is active, wait for one."""
        idle = not any(session.unfinished for session in self.sessions)
        for message in self._channel.receive(wait=idle):
            if isinstance(message, AddRequests):
                for request in message.requests:
                    self._add(message.session, request)
            elif isinstance(message, Cancel):
                self._adapters.pop(message.request_id, None)
                self.sessions[message.session].cancel(message.request_id)
            else:
                self._running = False

    def _add(self, session: int, request: SessionRequest) -> None:
        self._adapters[request.id] = request.adapter
        try:
            self.sessions[session].add(request)
        except Exception as error:
            self._fail(request.id, _one_line(error))

    def _step(self, index: int, session: GenerationSession) -> None:
        try:
            events = session.step()
        except Exception as error:
            # All requests of the session fail; later ones may succeed.
            log.exception("a step of the engine failed")
            self._num_failures[index, None] += 1
            for request_id in session.reset():
                self._fail(request_id, f"the engine failed: {_one_line(error)}")
            return
        if not events:
            return
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        self._tokens += tokens
        answered = {self._adapters[token.request_id] for token in tokens if token.request_id in self._adapters}
        damaged: set[str] = set()
        for event in events:
            if isinstance(event, FailureEvent) and event.request_id in self._adapters:  # not cancelled
                adapter = self._adapters[event.request_id]
                damaged.add(adapter)
                log.error("%s failed%s: %s", event.request_id, f" in {adapter}" if adapter else "", event.message)
                self._fail(event.request_id, event.message)
        self._num_failures.pop((index, None), None)
        if damaged or self._num_failures:
            # Steps in a row in which all requests of an adapter fail: its weights or the model's are damaged.
            for adapter in answered:
                self._num_failures.pop((index, adapter), None)
            self._num_failures.update((index, adapter) for adapter in damaged - answered)

    def _fail(self, request_id: str, message: str) -> None:
        self._adapters.pop(request_id, None)
        self._failures.append((request_id, message))

    def _report(self) -> None:
        counts = [session.counts for session in self.sessions]
        if not (self._tokens or self._failures or counts != self._counts):
            return
        broken = {what for what, count in self._num_failures.items() if count >= _MOST_FAILURES_IN_A_ROW}
        tokens = [tuple(token) for token in self._tokens]
        self._channel.send(tuple(EngineReport(tokens, self._failures, counts, broken)))
        self._tokens, self._failures, self._counts = [], [], counts


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
