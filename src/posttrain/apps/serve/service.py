"""The models and versions that a server offers, admission of requests, and their state until they are answered.

Everything here runs on the server's event loop. HTTP is in `app.py`, the models run in `engine_loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from posttrain.apps.serve.canary import CANARY, PRODUCTION, AnswerLog, Canary
from posttrain.apps.serve.engine_client import EngineClient, ServedSession
from posttrain.apps.serve.metrics import ServeMetrics
from posttrain.apps.serve.options import ServerLimits
from posttrain.apps.serve.protocol import ApiError, failed, overloaded, timed_out, unavailable
from posttrain.data.chat import ChatFormat
from posttrain.data.tool_calls import AnswerReader
from posttrain.data.tool_prompts import ToolChat, hidden_token_ids
from posttrain.engines.native.session import SessionRequest, TokenEvent
from posttrain.engines.native.stopping import stop_token_ids
from posttrain.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("posttrain.serve")

_LONGEST_RETRY_AFTER_S = 30


@dataclass(frozen=True)
class Version:
    """One set of weights: a session, and an adapter in it."""

    name: str  # in metrics and headers: "production", "canary"
    source: str  # the model reference that the user gave
    session: ServedSession
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    adapter: str = ""

    @property
    def max_total_tokens(self) -> int:
        return self.session.limits.max_total_tokens

    @cached_property
    def longest_token(self) -> int:
        """In characters: a text of n characters has at least n divided by this many tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        return self.chat.stop_token_ids

    @cached_property
    def tool_chat(self) -> ToolChat:
        return ToolChat(self.chat)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens that are not part of an answer in which calls or reasoning are read."""
        return hidden_token_ids(self.tokenizer, self.tool_chat.answers.markers)

    def stop_ids(self, sampling: Sampling) -> frozenset[int]:
        return stop_token_ids(self.session.limits.model_ends, self.tokenizer, sampling)


@dataclass(frozen=True)
class Job:
    """A validated request."""

    id: str
    model: str
    version: Version
    requests: Sequence[SessionRequest]  # one per prompt
    new_reader: Callable[[], AnswerReader] | None = None  # of calls and reasoning in an answer
    lists_logprobs: bool = False
    returns_ids: bool = False  # of tokens, in fields of their own
    writes_ids: bool = False  # of tokens, in place of their texts

    @property
    def num_samples(self) -> int:
        return sum(request.num_samples for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


class Service:
    """`models`: by the name that clients use. With a canary, requests for the first of them are split."""

    def __init__(
        self,
        engine: EngineClient,
        models: Mapping[str, Version],
        limits: ServerLimits | None = None,
        *,
        canary: Canary | None = None,
        canary_version: Version | None = None,
        api_keys: Sequence[str] = (),
        no_auth: bool = False,
    ) -> None:
        assert (canary is None) == (canary_version is None)
        self.models = dict(models)
        self.main_model = next(iter(models))
        self.limits = limits or ServerLimits()
        self.canary, self.canary_version = canary, canary_version
        self.api_keys = tuple(api_keys)
        self.no_auth = no_auth
        self.answers = AnswerLog()
        self.created = int(time.time())
        self.draining = False
        self._ending = False  # the drain time is over
        self.num_cut = 0  # samples that were unfinished at that time
        self.metrics = ServeMetrics()
        versions = [*self.models.values(), *([canary_version] if canary_version else [])]
        self.engine = engine
        self._inside = dict.fromkeys(engine.sessions, 0)
        self._tickets: set[Ticket] = set()  # open ones
        self._mean_seconds = 1.0  # of recent requests
        self._watch(versions)

    def _watch(self, versions: Sequence[Version]) -> None:
        gauges: dict[str, tuple[str, Callable[[ServedSession], float]]] = {
            "running_samples": ("Samples that decode now.", lambda s: s.counts.num_active),
            "waiting_samples": ("Samples that wait for a slot or for memory.", lambda s: s.counts.num_waiting),
            "kv_cache_pages": ("Pages of the KV cache.", lambda s: s.limits.num_pages),
            "kv_cache_pages_in_use": ("Pages of the KV cache in use.", lambda s: s.counts.pages_in_use),
            "reused_prompt_tokens": ("Prompt tokens found in the prefix cache.", lambda s: s.counts.num_reused_tokens),
            "preemptions": ("Samples that were preempted and wait again.", lambda s: s.counts.num_preemptions),
        }
        of_session = {version.session: version for version in reversed(versions)}  # named after the first version
        for name, (text, read) in gauges.items():
            self.metrics.watch(name, text, {v.name: partial(read, v.session) for v in of_session.values()})
        if (canary := self.canary) is not None:
            shares = {CANARY: lambda: canary.share, PRODUCTION: lambda: 1.0 - canary.share}
            self.metrics.watch("canary_share", "Share of the traffic of each version.", shares)
            means = {name: scores.mean_or_nan for name, scores in canary.scores.items()}
            self.metrics.watch("kpi_mean", "Mean of the scores of each version; NaN before the first.", means)

    # -- routing -----------------------------------------------------------------------------------------------------

    def version_for(self, model: str, key: str) -> Version:
        found = self.models.get(model)
        if found is None:
            known = ", ".join(self.models)
            raise ApiError(
                404, f"The model {model!r} does not exist; there is: {known}", param="model", code="model_not_found"
            )
        if self.canary is not None and self.canary_version is not None and model == self.main_model:
            if not self._works(self.canary_version):
                self.canary.roll_back("its engine has failed")
            if self.canary.takes(key):
                return self.canary_version
        return found

    def _works(self, version: Version) -> bool:
        return self.engine.works(version.session, version.adapter)

    @property
    def healthy(self) -> bool:
        return self._works(self.models[self.main_model])

    def rate(self, answer_id: str, score: float) -> str:
        """Count a user's score of an answer. Returns the version that answered."""
        version = self.answers.take(answer_id)
        if version is None:
            raise ApiError(
                404, f"no answer {answer_id!r} that could be rated: unknown, rated already, or too long ago", param="id"
            )
        self.metrics.feedback.labels(version).inc()
        if self.canary is not None and version in self.canary.scores:
            self.canary.rated(version, score)
        return version

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, job: Job, read: Callable[[list[TokenEvent]], None]) -> Ticket:
        """A ticket for the job, or ApiError 429 if the queue is full. The caller must close the ticket.

        `read` is called with the tokens as they arrive.
        """
        if self.draining:
            raise unavailable("the server is shutting down")
        session = job.version.session
        if not self._works(job.version):
            raise unavailable(f"the engine of {job.model} has failed; the server needs a restart")
        capacity = session.limits.max_batch_size + self.limits.max_queue
        inside = self._inside[session]
        if inside + job.num_samples > capacity:
            # Slots become free continuously: half of a recent request's time, waiting included, is a fair estimate.
            retry_after = min(_LONGEST_RETRY_AFTER_S, max(1, math.ceil(self._mean_seconds / 2)))
            raise overloaded(
                f"{inside} samples run or wait and {capacity} may; try again in about {retry_after} s", retry_after
            )
        self._inside[session] += job.num_samples
        ticket = Ticket(self, job, read)
        self._tickets.add(ticket)
        return ticket

    def end(self) -> None:
        """The drain time is over: fail all open tickets."""
        self.draining = self._ending = True
        for ticket in self._tickets:
            ticket.give_up("shutdown", unavailable("the server has shut down before the answer was complete"))

    def leave(self, ticket: Ticket, outcome: str, seconds: float) -> None:
        """Count a closed ticket."""
        job, completion_tokens = ticket.job, ticket.num_completion_tokens
        self._tickets.discard(ticket)
        labels = (job.model, job.version.name)
        self.metrics.requests.labels(*labels, outcome).inc()
        self.metrics.prompt_tokens.labels(*labels).inc(job.prompt_tokens)
        self.metrics.completion_tokens.labels(*labels).inc(completion_tokens)
        if outcome == "ok":
            self.metrics.request_seconds.labels(*labels).observe(seconds)
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
            self.answers.remember(job.id, job.version.name)
        if self._ending and outcome != "ok":
            self.num_cut += job.num_samples
        self._inside[job.version.session] -= job.num_samples  # last: once it is removed, it has been counted
        if self.canary is not None and outcome in ("ok", "error", "timeout"):
            self.canary.answered(job.version.name, ok=outcome == "ok")

    @property
    def num_inside(self) -> int:
        return sum(self._inside.values())


class Ticket:
    """An admitted job, until `close`. Closing an unfinished one frees its slots.

    `read` is called with the tokens in the callback that receives them, so that a token wakes no task. It calls
    `finished`, or sets `wakeup` if the task that answers the request has to act.
    """

    def __init__(self, service: Service, job: Job, read: Callable[[list[TokenEvent]], None]) -> None:
        self.job = job
        self.num_completion_tokens = 0  # of the answer; counted by the reader
        self.is_finished = False  # the answer is complete
        self.error: ApiError | None = None  # why it will not be
        self.wakeup = asyncio.Event()
        self._read = read
        self._service = service
        self._began = time.monotonic()
        self._outcome = "disconnected"  # unless it ends otherwise
        self._open = True
        labels = (job.model, job.version.name)
        self._first_seconds = service.metrics.first_token_seconds.labels(*labels)
        self._between_seconds = service.metrics.inter_token_seconds.labels(*labels)
        self._last_token_at: dict[tuple[str, int], float] = {}
        self.time_limit_s = service.limits.request_timeout_s
        late = timed_out(f"no complete answer within {self.time_limit_s:g} s")
        self._alarm = asyncio.get_running_loop().call_later(self.time_limit_s, self.give_up, "timeout", late)
        service.engine.submit(job.version.session, job.requests, self)

    def receive(self, tokens: list[TokenEvent]) -> None:
        if self.error is not None or self.is_finished:
            return
        self._observe(tokens)
        try:
            self._read(tokens)
        except Exception:  # of one request: the others get their tokens
            self.crash()

    def _observe(self, tokens: list[TokenEvent]) -> None:
        now, last_token_at = time.monotonic(), self._last_token_at
        if not last_token_at:
            self._first_seconds.observe(now - self._began)
        for token in tokens:
            name = (token.request_id, token.sample)
            if name in last_token_at:
                self._between_seconds.observe(now - last_token_at[name])
            last_token_at[name] = now

    def crash(self) -> None:
        """Fail because of the exception that is being handled."""
        log.exception("%s: its tokens cannot be read", self.job.id)
        self.fail("internal error")

    def fail(self, message: str) -> None:
        self.give_up("error", failed(message))

    def give_up(self, outcome: str, error: ApiError) -> None:
        """End with `error`, after the tokens that have arrived. The first error counts."""
        if self.error is None and not self.is_finished:
            self.error, self._outcome = error, outcome
            self.wakeup.set()

    def finished(self) -> None:
        """The answer is complete, even if the engine has not stopped yet."""
        self.is_finished, self._outcome = True, "ok"
        self.wakeup.set()

    def close(self) -> None:
        """Free the slots. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._alarm.cancel()
        for request in self.job.requests:
            self._service.engine.cancel(self.job.version.session, request.id)
        self._service.leave(self, self._outcome, time.monotonic() - self._began)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
