"""The engine thread: the only one that touches the models. It steps the sessions in turn.

Commands arrive through a queue; the events of a step are posted to the server's event loop in one call. One thread for all
sessions, because only one forward pass may run at a time in a process.
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
_Command = Callable[[], None]

# A session whose steps keep failing is marked as failed: the GPU is lost, or the weights cannot run. An adapter that keeps
# producing NaN is marked alone: its weights do not affect the others.
_MOST_FAILURES_IN_A_ROW = 3

log = logging.getLogger("posttrain.serve")


@dataclass(frozen=True)
class _Caller:
    sink: Sink
    adapter: str


class EngineThread:
    def __init__(self, sessions: Sequence[GenerationSession]) -> None:
        self._sessions = list(sessions)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._callers: dict[str, _Caller] = {}  # by request
        self._failed_steps: Counter[int] = Counter()  # in a row, by session
        self._failed_answers: Counter[tuple[int, str]] = Counter()  # steps in a row with NaN only, by adapter
        self._running = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="posttrain-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are posted to `loop`."""
        self._loop = loop
        self._thread.start()

    def works(self, session: GenerationSession, adapter: str) -> bool:
        failures = max(self._failed_steps[id(session)], self._failed_answers[id(session), adapter])
        return self._thread.is_alive() and failures < _MOST_FAILURES_IN_A_ROW

    def submit(self, session: GenerationSession, request: SessionRequest, sink: Sink) -> None:
        """`sink` is called with every event of the request, on the event loop."""

        def command() -> None:
            self._callers[request.id] = _Caller(sink, request.adapter)
            try:
                session.add(request)
            except Exception as error:
                self._deliver([FailureEvent(request.id, _one_line(error))])

        self._commands.put(command)

    def cancel(self, session: GenerationSession, request_id: str) -> None:
        """The request takes part in no further step. Finished and unknown requests are ignored."""

        def command() -> None:
            self._callers.pop(request_id, None)
            session.cancel(request_id)

        self._commands.put(command)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step. Unfinished requests are dropped."""

        def command() -> None:
            self._running = False

        self._commands.put(command)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._running:
                self._run_commands()
                events = [event for session in self._sessions if session.unfinished for event in self._step(session)]
                if events:
                    self._deliver(events)
        except BaseException:
            log.exception("the engine's thread has ended")
            self._deliver([FailureEvent(request_id, "the engine has ended") for request_id in self._callers])

    def _run_commands(self) -> None:
        """Run all queued commands; when no request is active, wait for one."""
        idle = not any(session.unfinished for session in self._sessions)
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            idle = False
            command()

    def _step(self, session: GenerationSession) -> list[Event]:
        try:
            events = session.step()
        except Exception as error:
            # All requests of the session fail; later ones may succeed.
            log.exception("a step of the engine failed")
            self._failed_steps[id(session)] += 1
            message = f"the engine failed: {_one_line(error)}"
            return [FailureEvent(request_id, message) for request_id in session.reset()]
        if events:
            self._failed_steps[id(session)] = 0
            self._count_failures(session, events)
        return events

    def _count_failures(self, session: GenerationSession, events: Sequence[Event]) -> None:
        """Count the steps in a row in which all requests of an adapter fail: its weights or the model's are damaged."""
        answered: set[str] = set()
        failed: set[str] = set()
        for event in events:
            if (caller := self._callers.get(event.request_id)) is None:
                continue  # cancelled
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
        calls = [(callers[event.request_id].sink, event) for event in events if event.request_id in callers]
        for event in events:
            if isinstance(event, FailureEvent):
                self._callers.pop(event.request_id, None)
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_call_sinks, calls)
        except RuntimeError:  # the loop is closed: the server has ended
            self._running = False


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _call_sinks(calls: Sequence[tuple[Sink, Event]]) -> None:
    for sink, event in calls:
        sink(event)
