"""The thread that owns the models: it drives the sessions, one step each in turn, and nobody else touches them.

Orders come in through a queue; events go out to the event loop of the server, all of a step in one call. One thread for all
sessions, because only one forward pass may run at a time in a process. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.engines.native.session import Event, FailureEvent, GenerationSession, SessionRequest

Sink = Callable[[Event], None]
_Order = Callable[[], None]

# A session whose steps keep failing is given up: the GPU is gone, or the weights cannot run. An adapter that keeps giving no
# numbers is given up alone: its weights are nobody else's.
_MOST_FAILURES_IN_A_ROW = 3

log = logging.getLogger("posttrain.serve")


@dataclass(frozen=True)
class _Caller:
    sink: Sink
    adapter: str


class EngineThread:
    def __init__(self, sessions: Sequence[GenerationSession]) -> None:
        self._sessions = list(sessions)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._callers: dict[str, _Caller] = {}  # by request
        self._failed_steps: Counter[int] = Counter()  # in a row, by session
        self._failed_answers: Counter[tuple[int, str]] = Counter()  # steps in a row without a number, by adapter
        self._running = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="posttrain-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on events go to `loop`."""
        self._loop = loop
        self._thread.start()

    def works(self, session: GenerationSession, adapter: str) -> bool:
        failures = max(self._failed_steps[id(session)], self._failed_answers[id(session), adapter])
        return self._thread.is_alive() and failures < _MOST_FAILURES_IN_A_ROW

    def submit(self, session: GenerationSession, request: SessionRequest, sink: Sink) -> None:
        """`sink` hears every event of the request, on the event loop."""

        def order() -> None:
            self._callers[request.id] = _Caller(sink, request.adapter)
            try:
                session.add(request)
            except Exception as error:
                self._deliver([FailureEvent(request.id, _one_line(error))])

        self._orders.put(order)

    def cancel(self, session: GenerationSession, request_id: str) -> None:
        """After this the request takes no more steps. One that is finished or unknown is no error."""

        def order() -> None:
            self._callers.pop(request_id, None)
            session.cancel(request_id)

        self._orders.put(order)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the step that it is in. What still runs is dropped."""

        def order() -> None:
            self._running = False

        self._orders.put(order)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._running:
                self._take_orders()
                events = [event for session in self._sessions if session.unfinished for event in self._step(session)]
                if events:
                    self._deliver(events)
        except BaseException:
            log.exception("the engine's thread has ended")
            self._deliver([FailureEvent(request_id, "the engine has ended") for request_id in self._callers])

    def _take_orders(self) -> None:
        """All that have come; when nothing runs, wait for one."""
        idle = not any(session.unfinished for session in self._sessions)
        while True:
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return
            idle = False
            order()

    def _step(self, session: GenerationSession) -> list[Event]:
        try:
            events = session.step()
        except Exception as error:
            # Whatever it was, those who wait must hear of it, and others may have better luck.
            log.exception("a step of the engine failed")
            self._failed_steps[id(session)] += 1
            message = f"the engine failed: {_one_line(error)}"
            return [FailureEvent(request_id, message) for request_id in session.reset()]
        if events:
            self._failed_steps[id(session)] = 0
            self._judge(session, events)
        return events

    def _judge(self, session: GenerationSession, events: Sequence[Event]) -> None:
        """Count the steps in which an adapter gives nobody an answer: its weights are damaged, or the model's are."""
        answered: set[str] = set()
        failed: set[str] = set()
        for event in events:
            if (caller := self._callers.get(event.request_id)) is None:
                continue  # it has left
            adapter = caller.adapter
            if isinstance(event, FailureEvent):
                failed.add(adapter)
                log.error("%s failed%s: %s", event.request_id, f" in {adapter}" if adapter else "", event.message)
            else:
                answered.add(adapter)
        for adapter in answered:
            self._failed_answers[id(session), adapter] = 0
        for adapter in failed - answered:
            self._failed_answers[id(session), adapter] += 1

    def _deliver(self, events: Sequence[Event]) -> None:
        callers = self._callers
        addressed = [(callers[event.request_id].sink, event) for event in events if event.request_id in callers]
        for event in events:
            if isinstance(event, FailureEvent):
                self._callers.pop(event.request_id, None)
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_hand_out, addressed)
        except RuntimeError:  # the loop is closed: the server has gone
            self._running = False


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _hand_out(addressed: Sequence[tuple[Sink, Event]]) -> None:
    for sink, event in addressed:
        sink(event)
