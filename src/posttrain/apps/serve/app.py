"""The HTTP layer: routes, API keys, body limits, streams. The models are in `service.py`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from posttrain.apps.serve.canary import CANARY
from posttrain.apps.serve.jobs import chat_job, choices_of, completion_job, tokenized
from posttrain.apps.serve.options import host_of, is_ip_address, is_loopback
from posttrain.apps.serve.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    FeedbackBody,
    TokenizeChatBody,
    TokenizeTextBody,
    bad_request,
    check_prompt,
    failed,
    parse_body,
    parse_chat,
    parse_completion,
)
from posttrain.apps.serve.responses import DONE, AnswerText, JsonObject, ResponseWriter, server_sent
from posttrain.apps.serve.service import Job, Service
from posttrain.engines.native.session import TokenEvent

log = logging.getLogger("posttrain.serve")

# Bytes of an oversized body that are read and discarded: a client that is still sending would miss the error.
MOST_BYTES_TO_DISCARD = 32 * 2**20
DISCARD_S = 1.0  # for that, where the head has announced it
SLOW_READER_S = 30.0  # after the time limit of a request, for a client to read the end of its stream
CLIENT = "x-request-id"  # names the client, if the body does not name a user
CLIENT_CLOSED_REQUEST = 499  # for logs only: the client has disconnected


def create_app(service: Service) -> Starlette:
    """The caller starts and stops `service.engine`."""

    async def api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        service.metrics.refused.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, error.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return await api_error(request, ApiError(error.status_code, message, headers=error.headers))

    async def crash(_request: Request, error: Exception) -> Response:
        log.error("a request crashed", exc_info=error)
        return JSONResponse(failed("internal error").body, 500)

    handlers = {ApiError: api_error, HTTPException: http_error, Exception: crash}
    return Starlette(routes=_routes(service), exception_handlers=handlers, middleware=[Middleware(_OneLength)])


class _OneLength:
    """Refuses a request with two lengths: for a proxy it may end elsewhere, and what follows be another request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}:
            error = ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
            await JSONResponse(error.body, error.status, {"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _routes(service: Service) -> list[Route]:
    async def health(request: Request) -> Response:
        _refuse_foreign_pages(service, request, is_probe=True)
        body = _health(service)
        return JSONResponse(body, 200 if body["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        _refuse_foreign_pages(service, request, is_probe=True)
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        _authorise(service, request)
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.models]})

    async def model(request: Request) -> Response:
        _authorise(service, request)
        name = request.path_params["name"]
        service.version_for(name, "")  # raises if it does not exist
        return JSONResponse(_model(service, name))

    async def chat(request: Request) -> Response:
        body = parse_chat(await _read(service, request))
        return await _answer(service, request, body, await chat_job(service, body, request.headers.get(CLIENT)))

    async def completions(request: Request) -> Response:
        body = parse_completion(await _read(service, request))
        return await _answer(service, request, body, await completion_job(service, body, request.headers.get(CLIENT)))

    async def feedback(request: Request) -> Response:
        body = parse_body(FeedbackBody, await _read(service, request))
        return JSONResponse({"id": body.id, "version": service.rate(body.id, body.score), "score": body.score})

    async def tokenize(request: Request) -> Response:
        raw = await _read(service, request)
        body: TokenizeChatBody | TokenizeTextBody
        if re.search(rb'"messages"\s*:', raw):  # in a text its quotes are escaped
            check_prompt(body := parse_body(TokenizeChatBody, raw))
        else:
            body = parse_body(TokenizeTextBody, raw)
        version = service.version_for(body.model or service.main_model, "")
        ids = await tokenized(version, body)
        found: JsonObject = {"count": len(ids), "max_model_len": version.max_total_tokens, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = version.tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(found)

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await _read(service, request))
        version = service.version_for(body.model or service.main_model, "")
        limit = version.session.limits.vocab_size
        if body.tokens and max(body.tokens) >= limit:
            raise bad_request(f"tokens: {max(body.tokens)} is outside the vocabulary of {limit} tokens", "tokens")
        return JSONResponse({"prompt": version.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/feedback", feedback, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


# -- requests ----------------------------------------------------------------------------------------------------------


def _authorise(service: Service, request: Request) -> None:
    if not service.api_keys:
        _refuse_foreign_pages(service, request)
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    accepted = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in service.api_keys]
    if scheme.lower() != "bearer" or not any(accepted):
        what = "Incorrect API key provided" if given else "You didn't provide an API key"
        raise ApiError(
            401,
            f"{what}: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _refuse_foreign_pages(service: Service, request: Request, *, is_probe: bool = False) -> None:
    """Without a key, a web page could use the server through the browser of somebody who can reach it.

    Browsers send the requesting page in `Origin`. With DNS rebinding the `Host` is that of the attacking page, so a
    local server accepts only the names of this machine. Probes may also use an IP address, as those of Kubernetes do:
    no DNS record is involved.
    """
    if service.api_keys:
        return
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host.lower():
        raise ApiError(
            403, f"requests from the page {origin} are refused by a server without a key", code="foreign_origin"
        )
    name = host_of(host)
    if not (service.no_auth or is_loopback(name) or (is_probe and is_ip_address(name))):
        raise ApiError(
            403, f"Host is {host!r}: a server without a key answers to localhost only; set a key", code="foreign_host"
        )


async def _read(service: Service, request: Request) -> bytes:
    """The body, after the API key was checked, up to the size limit."""
    _authorise(service, request)
    limit = service.limits.max_body_bytes
    declared = request.headers.get("content-length", "")
    size = limit + 1 if declared.isdecimal() and int(declared[:20]) > limit else 0
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(service.limits.body_timeout_s if not size else DISCARD_S):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > limit + MOST_BYTES_TO_DISCARD:
                    break
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client left before its body was complete") from None
    except TimeoutError:
        if size <= limit:
            message = f"the body did not arrive within {service.limits.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
    if size > limit:
        message = f"the body has more than {limit} bytes"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
    return b"".join(parts)


# -- answers -----------------------------------------------------------------------------------------------------------


async def _answer(service: Service, request: Request, body: ChatBody | CompletionBody, job: Job) -> Response:
    writer = ResponseWriter(
        job,
        chat=isinstance(body, ChatBody),
        streams=body.streams,
        includes_usage=body.includes_usage,
    )
    headers = {"x-request-id": job.id, "x-posttrain-version": job.version.name}
    answer = AnswerText(choices_of(job))
    if body.streams:
        return _Stream(service, job, answer, writer, body.includes_usage, headers)
    try:
        whole = await _whole(service, request, job, answer, writer)
    except ApiError as error:
        error.headers.update(headers)
        raise
    return JSONResponse(whole, headers=headers) if whole is not None else Response(status_code=CLIENT_CLOSED_REQUEST)


async def _whole(
    service: Service, request: Request, job: Job, answer: AnswerText, writer: ResponseWriter
) -> JsonObject | None:
    """The body of an answer that is not streamed; None if the client has disconnected."""

    def read(tokens: list[TokenEvent]) -> None:
        for piece in answer.push(tokens):
            writer.add(piece)
        ticket.num_completion_tokens = answer.num_tokens
        if answer.is_complete:
            ticket.finished()

    ticket = service.admit(job, read)
    try:
        if not await _unless_disconnected(request.receive, ticket.wakeup.wait()):
            return None
        if ticket.error is not None:
            raise ticket.error
        return writer.whole(answer.num_tokens)
    finally:
        ticket.close()


async def _unless_disconnected(receive: Receive, work: Coroutine[None, None, object]) -> bool:
    """Whether the work was done before the client has disconnected, which ends it."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, watching):
            task.cancel()


class Connection(Protocol):
    """What `server.py` adds to the state of a request: writes chunks of a body without ASGI."""

    def can_write_chunk(self) -> bool:
        """Whether a chunk may be written now: the client reads as fast as the server writes."""

    def write_chunk(self, data: bytes) -> None: ...


class _Stream(Response):
    """An answer in server-sent events.

    Events are written to the connection in the callback that receives the tokens: no task is woken for a token. If the
    client reads too slowly, or the connection cannot write chunks, tokens wait, and the response's task sends all of
    them at once as soon as it can. Closes its ticket however the stream ends: complete, by an error, because the
    client disconnected, or because it stopped reading.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        answer: AnswerText,
        writer: ResponseWriter,
        includes_usage: bool,
        headers: dict[str, str],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._answer, self._writer, self._includes_usage = answer, writer, includes_usage
        self._connection: Connection | None = None  # when the head has been sent, except while the task sends
        self._waiting: list[TokenEvent] = []
        self._ticket = service.admit(job, self._read)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._ticket.time_limit_s + SLOW_READER_S):
                await _unless_disconnected(receive, self._respond(scope, send))
        except TimeoutError:
            log.warning("%s: the client has stopped reading its stream", self._ticket.job.id)
        finally:
            self._ticket.close()

    def _read(self, tokens: list[TokenEvent]) -> None:
        if self._connection is not None and not self._waiting and self._connection.can_write_chunk():
            if events := self._events(tokens):
                self._connection.write_chunk(events)
        else:
            self._waiting += tokens
            self._ticket.wakeup.set()

    def _events(self, tokens: list[TokenEvent]) -> bytes:
        try:
            events = b"".join(map(self._writer.chunk, self._answer.push(tokens)))
        except Exception:
            self._ticket.crash()
            return b""
        self._ticket.num_completion_tokens = self._answer.num_tokens
        if self._answer.is_complete:
            self._ticket.finished()
        return events

    async def _respond(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        ticket, connection = self._ticket, scope.get("state", {}).get("connection")
        while self._waiting or not (ticket.is_finished or ticket.error):
            self._connection = connection
            if not self._waiting:
                ticket.wakeup.clear()
                await ticket.wakeup.wait()
            self._connection = None  # tokens that arrive now are sent after these
            tokens, self._waiting = self._waiting, []
            if events := self._events(tokens):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": self._end(), "more_body": False})

    def _end(self) -> bytes:
        if not self._ticket.is_finished and self._ticket.error is not None:
            # The status was sent already. OpenAI's clients raise on an event with an error.
            return server_sent(self._ticket.error.body)
        return (self._writer.last_chunk(self._answer.num_tokens) if self._includes_usage else b"") + DONE


# -- status ------------------------------------------------------------------------------------------------------------


def _model(service: Service, name: str) -> JsonObject:
    version = service.models[name]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "posttrain",
        "root": _public(version.source),
        "parent": service.main_model if version.adapter and name != service.main_model else None,
        "max_model_len": version.max_total_tokens,
        "tool_call_parser": version.tool_chat.answers.name or None,
    }


def _public(source: str) -> str:
    """Clients get the name of a folder, not its path."""
    return Path(source).name if Path(source).is_absolute() else source


def _health(service: Service) -> JsonObject:
    status = "draining" if service.draining else "ok" if service.healthy else "failed"
    body: JsonObject = {
        "status": status,
        "running": sum(session.counts.num_active for session in service.engine.sessions),
        "waiting": sum(session.counts.num_waiting for session in service.engine.sessions),
        "models": list(service.models),
    }
    if service.canary is not None and service.canary_version is not None:
        canary = service.canary
        body[CANARY] = {
            "source": _public(service.canary_version.source),
            "share": canary.share,
            "rolled_back": canary.rollback_reason,
            "scores": {
                name: {"count": scores.count, "mean": scores.mean if scores.count else None}
                for name, scores in canary.scores.items()
            },
        }
    return body
