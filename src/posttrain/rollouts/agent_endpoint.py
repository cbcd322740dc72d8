"""The endpoint that agents ask during rollouts: OpenAI's chat completions over HTTP, on this machine only.

Each rollout has a key of its own, made at random, which opens that rollout and ends with it. A request waits for its
turn in a batch; `next_batch` hands requests to whoever samples. A batch holds one request or more of every agent that
runs, so that what is sampled together does not depend on the clock; an agent that works for longer than `MAX_WAIT_S` is
not waited for.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RD, SHUT_RDWR, socket
from urllib.parse import unquote

from posttrain.data.errors import DataError
from posttrain.environments.agents.pool import AgentClock
from posttrain.environments.agents.runner import Endpoint
from posttrain.files.digests import blake2_of
from posttrain.rollouts.agent_requests import ChatAnswer, ChatRequest, RefusedRequest, read_request
from posttrain.rollouts.call_journal import CallJournal
from posttrain.rollouts.call_tree import Call, CallTree, PromptWriter
from posttrain.types import Completion, Sampling, Score, Task

_MAX_BODY_BYTES = 32 << 20
_READ_LIMIT_S = 600.0  # of a connection that sends nothing more, and
_FIRST_LIMIT_S = 30.0  # of one that has shown no key
_FULL_LIMIT_S = 10.0  # of a connection, for one of the others to end
MAX_CONNECTIONS = 64  # of one rollout
_MAX_REFUSED = 16  # requests that are not sampled, beside `max_calls`, after which an agent is given up
_POLL_S = 0.2
Packet = socket | tuple[bytes, socket]  # as in `socketserver`
MAX_WAIT_S = 10.0  # of a request, for agents that work meanwhile


@dataclass(eq=False)
class AgentSession:
    """One rollout: its key, its requests so far, and the time that it has waited for the model."""

    task: Task
    sample: int
    tree: CallTree
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    clock: AgentClock = field(default_factory=AgentClock)
    counts: Counter[str] = field(
        default_factory=lambda: Counter(
            agent_calls=0,
            calls_with_tools=0,
            tool_calls=0,
            malformed_tool_calls=0,
            overridden_sampling=0,
            out_of_turns=0,
            out_of_tokens=0,
        )
    )
    is_over: bool = False
    score: Score | None = None  # what came of it
    asked: dict[str, list[PendingCall]] = field(default_factory=dict)  # by digest of the prompt
    connections: set[socket] = field(default_factory=set)
    num_refused: int = 0  # requests that were not sampled

    @property
    def rollout(self) -> tuple[int, int]:
        return self.task.draw, self.sample


@dataclass(eq=False)
class PendingCall:
    """A request that waits for its answer, or has it."""

    session: AgentSession
    request: ChatRequest
    call: Call
    since: float = field(default_factory=time.monotonic)
    answered: threading.Event = field(default_factory=threading.Event)
    answer: ChatAnswer | None = None


def task_of_call(task: Task, sample: int, call: Call) -> Task:
    """For an engine. Noise is keyed by the rollout and the prompt, not by the order of requests."""
    first = int.from_bytes(blake2_of(f"{call.key}", 8), "big") >> 4
    later = replace(task, prompt="", prompt_ids=call.prompt_ids, first_sample=sample, first_token=first)
    return replace(later, max_new_tokens=call.sampling.max_new_tokens)


class AgentEndpoint:
    """Listens from its creation to `close`. Handler threads wait in `ask`; one other thread calls the rest."""

    def __init__(
        self, writer: PromptWriter, model: str, *, max_calls: int, max_total_tokens: int, max_connections: int
    ) -> None:
        self.writer, self.model = writer, model
        self.max_calls, self.max_total_tokens = max_calls, max_total_tokens
        self.sampling = Sampling(1)
        self.journal: CallJournal | None = None
        self._sessions: dict[str, AgentSession] = {}  # by key
        self._pending: list[PendingCall] = []
        self._collects_since: float | None = None  # for the next batch
        self._changed = threading.Condition()
        self._server = _Server(self, max_connections)
        threading.Thread(target=self._server.serve_forever, name="agent endpoint", daemon=True).start()

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def open(self, task: Task, sample: int) -> AgentSession:
        session = AgentSession(task, sample, CallTree(self.writer))
        self._sessions[session.key] = session
        return session

    def address(self, session: AgentSession) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self._server.server_port}/v1", session.key, self.model)

    def end(self, session: AgentSession) -> None:
        """Its key is refused from here on; requests that wait get an error."""
        with self._changed:
            session.is_over = True
            self._sessions.pop(session.key, None)
            for pending in (pending for asked in session.asked.values() for pending in asked):
                pending.answered.set()
            self._pending = [pending for pending in self._pending if pending.session is not session]
            for connection in list(
                session.connections
            ):  # what is being answered is written, and nothing is read after it
                with suppress(OSError):
                    connection.shutdown(SHUT_RD)
            self._changed.notify_all()

    def close(self) -> None:
        for session in list(self._sessions.values()):
            self.end(session)
        self._server.shutdown()
        self._server.server_close()

    # -- batches -------------------------------------------------------------------------------------------------------

    def next_batch(self, num_running: Callable[[], int]) -> list[PendingCall]:
        """Requests to sample together, in an order that does not depend on the clock; none if there are none yet."""
        with self._changed:
            ready = len({id(pending.session) for pending in self._pending})
            now = time.monotonic()
            if self._collects_since is None:  # while a batch is sampled, agents cannot ask the next
                self._collects_since = now
            waited_s = now - max(self._collects_since, min((one.since for one in self._pending), default=now))
            num_slow = sum(session.clock.worked_s > MAX_WAIT_S for session in self._sessions.values())
            if not ready or (ready < num_running() - num_slow and waited_s < MAX_WAIT_S):
                self._changed.wait(_POLL_S)
                return []
            batch, self._pending, self._collects_since = self._pending, [], None
            return sorted(batch, key=lambda pending: (*pending.session.rollout, *pending.call.key))

    def reply(self, answers: Sequence[tuple[PendingCall, Completion]]) -> None:
        """Record the answers of requests that were sampled together, then let the agents have them."""
        read = [self.writer.read(one.call.prompt_ids, answer, one.request.used_tools) for one, answer in answers]
        with self._changed:
            for (pending, answer), parts in zip(answers, read, strict=True):
                session, call = pending.session, pending.call
                call.answer = answer
                if session.is_over:  # it is in the journal only: a resumed run samples the batch as it was
                    continue
                message = parts.message(str(call.key))
                session.tree.add(call, answer, message)
                session.counts["tool_calls"] += len(parts.tool_calls)
                session.counts["malformed_tool_calls"] += parts.num_malformed
                finish = "tool_calls" if parts.tool_calls and answer.finish_reason == "stop" else answer.finish_reason
                name = f"chatcmpl-{call.key[0][:24]}-{call.key[1]}"
                pending.answer = ChatAnswer(name, self.model, message, finish, call.prompt_ids, answer.token_ids)
            if self.journal is not None:
                self.journal.add([(one.session.rollout, one.call) for one, _ in answers])
            for one, _ in answers:
                one.answered.set()

    # -- requests ------------------------------------------------------------------------------------------------------

    def admit(self, key: str, connection: socket) -> AgentSession:
        with self._changed:
            session = self._sessions.get(key)
            if session is None:
                raise RefusedRequest("this API key belongs to no rollout that runs", code="invalid_api_key", status=401)
            if len(session.connections | {connection}) > MAX_CONNECTIONS:
                problem = f"a rollout may have {MAX_CONNECTIONS} connections at a time"
                raise RefusedRequest(problem, code="too_many_connections", status=429)
            session.connections.add(connection)
            return session

    def ask(self, session: AgentSession, body: bytes, *, is_retry: bool) -> tuple[ChatRequest, ChatAnswer]:
        """Called by a thread of the server, which waits here for the answer."""
        with self._changed:
            session.clock.ask()  # from here on: to render and tokenise a long history takes time too
        try:
            return self._answer(session, read_request(body), is_retry=is_retry)
        except RefusedRequest as error:
            self._count_refusal(session, str(error))
            raise
        finally:
            with self._changed:
                session.clock.answered()

    def _count_refusal(self, session: AgentSession, reason: str) -> None:
        """An agent that asks on and on, whatever it is answered, is given up."""
        with self._changed:
            session.num_refused += 1
            if session.num_refused == self.max_calls + _MAX_REFUSED:
                session.clock.problem = f"the agent asked on after {session.num_refused} refusals; the last: {reason}"

    def _answer(self, session: AgentSession, request: ChatRequest, *, is_retry: bool) -> tuple[ChatRequest, ChatAnswer]:
        if session.counts["agent_calls"] >= self.max_calls and not is_retry:
            session.counts["out_of_turns"] = 1
            return request, self._last_word(session)
        messages = [message.plain() for message in request.messages]
        limits = (self.sampling.max_new_tokens, request.max_tokens, request.max_completion_tokens)
        stops = tuple(dict.fromkeys((*self.sampling.stop_strings, *request.stop)))
        sampling = replace(self.sampling, max_new_tokens=min(filter(None, limits)), stop_strings=stops)
        try:
            call = session.tree.call(messages, request.used_tools, sampling)
        except DataError as error:
            raise RefusedRequest(str(error), "messages") from error
        if (length := len(call.prompt_ids)) >= self.max_total_tokens:
            session.counts["out_of_tokens"] = 1
            problem = f"the prompt has {length} tokens, which leaves no room in {self.max_total_tokens} "
            problem += "(policy.max_total_sequence_length)"
            raise RefusedRequest(problem, "messages", "context_length_exceeded")
        pending = self._enter(PendingCall(session, request, call), is_retry=is_retry)
        if pending is None:
            return request, self._last_word(session)
        while not pending.answered.wait(_POLL_S):
            pass
        if pending.answer is None:
            raise RefusedRequest("the rollout is over", code="rollout_over", status=401)
        return request, pending.answer

    def _enter(self, pending: PendingCall, *, is_retry: bool) -> PendingCall | None:
        """What answers the request: itself, or the one that it repeats. None: there were too many."""
        session, call = pending.session, pending.call
        with self._changed:
            earlier = session.asked.setdefault(call.key[0], [])
            if is_retry and earlier:
                return earlier[-1]
            if session.is_over or session.counts["agent_calls"] >= self.max_calls:
                return None
            call.key = (call.key[0], len(earlier))
            earlier.append(pending)
            session.counts["agent_calls"] += 1
            session.counts["calls_with_tools"] += bool(pending.request.used_tools)
            session.counts["overridden_sampling"] += pending.request.num_overridden
            known = self.journal.answer(session.rollout, call.key) if self.journal is not None else None
            if known is None:
                self._pending.append(pending)
                self._changed.notify_all()
        if known is not None:
            self.reply([(pending, known)])
        return pending

    def _last_word(self, session: AgentSession) -> ChatAnswer:
        """To requests over the limit. It is not the model's, and not trained."""
        text = f"The limit of {self.max_calls} requests (grpo.max_rollout_turns) is reached."
        self._count_refusal(session, text)
        return ChatAnswer("chatcmpl-limit", self.model, {"role": "assistant", "content": text}, "length")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, endpoint: AgentEndpoint, max_connections: int) -> None:
        self.endpoint = endpoint
        self._free = threading.BoundedSemaphore(max_connections)
        self.unknown: dict[socket, None] = {}  # connections that have shown no key, oldest first
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Packet, client_address: object) -> None:
        assert isinstance(request, socket)
        is_free = self._free.acquire(blocking=False)
        if not is_free:
            with suppress(OSError, StopIteration):
                next(iter(self.unknown.copy())).shutdown(SHUT_RDWR)
            is_free = self._free.acquire(timeout=_FULL_LIMIT_S)
        if is_free:
            self.unknown[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Packet, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.unknown.pop(request, None)  # type: ignore[arg-type]
            self._free.release()

    def handle_error(self, request: Packet, client_address: object) -> None:
        """A connection that its client has closed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _FIRST_LIMIT_S
    server: _Server
    session: AgentSession | None = None

    def finish(self) -> None:
        self._leave()
        super().finish()

    def _leave(self) -> None:
        if self.session is not None:
            self.session.connections.discard(self.connection)

    def do_GET(self) -> None:
        name = self.server.endpoint.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}
        known = {"/v1/models": {"object": "list", "data": [model]}, f"/v1/models/{name}": model}
        answer = known.get(unquote(self.path).rstrip("/"))
        missing = RefusedRequest(f"there is no {self.path}", status=404)
        self._send(json.dumps(answer or missing.body), 200 if answer else missing.status)

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path.rstrip("/") != "/v1/chat/completions":
                raise RefusedRequest(f"there is no {self.path}: agents ask /v1/chat/completions", status=404)
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            is_retry = self.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            key = bearer or self.headers.get("x-api-key", "")
            self._leave()
            self.session = self.server.endpoint.admit(key, self.connection)
            self.server.unknown.pop(self.connection, None)
            self.connection.settimeout(_READ_LIMIT_S)
            request, answer = self.server.endpoint.ask(self.session, body, is_retry=is_retry)
        except RefusedRequest as error:
            self.close_connection = self.close_connection or error.status in (401, 429)
            self._send(json.dumps(error.body), error.status)
        except OSError:
            raise
        except Exception as error:  # of ours: the rollout fails with it, and not without a word
            problem = RefusedRequest(f"internal error: {type(error).__name__}: {error}", status=500)
            self._send(json.dumps(problem.body), problem.status)
        else:
            self._send(answer.text(request), kind="text/event-stream" if request.stream else "application/json")

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 20 or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            status = 413 if length.isdecimal() else 400
            raise RefusedRequest(f"a body with a Content-Length of at most {_MAX_BODY_BYTES} is needed", status=status)
        return self.rfile.read(int(length))

    def _send(self, text: str, status: int = 200, kind: str = "application/json") -> None:
        data = text.encode()
        with suppress(OSError):  # the agent has gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each request would hide the run's."""
