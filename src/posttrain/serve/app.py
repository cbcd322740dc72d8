"""The HTTP layer: routes, API keys, body limits, streams. The models are in `service.py`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from posttrain.serve.canary import CANARY
from posttrain.serve.jobs import chat_job, choices_of, completion_job
from posttrain.serve.options import is_loopback
from posttrain.serve.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    failed,
    parse_chat,
    parse_completion,
    parse_feedback,
)
from posttrain.serve.responses import DONE, JsonObject, Piece, ResponseWriter, server_sent
from posttrain.serve.service import Job, Service, Ticket

log = logging.getLogger("posttrain.serve")

# Bytes of an oversized body that are read and discarded: a client that is still sending would miss the error.
MOST_BYTES_TO_DISCARD = 32 * 2**20
DISCARD_S = 1.0  # for that, where the head has announced it
SLOW_READER_S = 30.0  # after the time limit of a request, for a client to read the end of its stream
CLIENT_CLOSED_REQUEST = 499  # for logs only: the client has disconnected


def create_app(service: Service) -> FastAPI:
    """The caller starts and stops `service.engine`."""
    app = FastAPI(title="posttrain", docs_url=None, redoc_url=None, openapi_url=None)

    async def api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        service.metrics.refused.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, error.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await api_error(request, ApiError(error.status_code, message, headers=error.headers))

    async def crash(_request: Request, error: Exception) -> Response:
        log.error("a request crashed", exc_info=error)
        return JSONResponse(failed("internal error").body, 500)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, crash)
    _add_routes(app, service)
    app.add_middleware(_OneLength)
    return app


class _OneLength:
    """Refuses a request with two lengths: a proxy may see its end elsewhere, and take what follows for another request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}:
            error = ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
            await JSONResponse(error.body, error.status, {"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])  # load balancers use either
    async def health() -> Response:
        return _health(service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authorise(service, request)
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        _authorise(service, request)
        service.version_for(name, "")  # raises if it does not exist
        return JSONResponse(_model(service, name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse_chat(await _read(service, request))
        return await _answer(service, request, body, await chat_job(service, body, _key(request)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_completion(await _read(service, request))
        return await _answer(service, request, body, await completion_job(service, body, _key(request)))

    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        body = parse_feedback(await _read(service, request))
        return JSONResponse({"id": body.id, "version": service.rate(body.id, body.score), "score": body.score})


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


def _refuse_foreign_pages(service: Service, request: Request) -> None:
    """Without a key, a web page could use the server through the browser of somebody who can reach it.

    Browsers send the requesting page in `Origin`. With DNS rebinding the `Host` is that of the attacking page, so a
    local server accepts only the names of this machine.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host.lower():
        raise ApiError(
            403, f"requests from the page {origin} are refused by a server without a key", code="foreign_origin"
        )
    if not service.no_auth and not is_loopback(urlsplit(f"//{host}").hostname or ""):
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


def _key(request: Request) -> str | None:
    """The client, if the body does not name a user."""
    return request.headers.get("x-request-id")


# -- answers -----------------------------------------------------------------------------------------------------------


async def _answer(service: Service, request: Request, body: ChatBody | CompletionBody, job: Job) -> Response:
    writer = ResponseWriter(
        job,
        chat=isinstance(body, ChatBody),
        streams=body.streams,
        logprobs=body.num_top_logprobs is not None,
        includes_usage=body.includes_usage,
    )
    headers = {"x-request-id": job.id, "x-posttrain-version": job.version.name}
    ticket = service.admit(job)
    if body.streams:
        return _Stream(ticket, _events(ticket, writer, body.includes_usage), headers)
    try:
        whole = await _unless_disconnected(request, _whole(ticket, writer))
    except ApiError as error:
        error.headers.update(headers)
        raise
    finally:
        ticket.close()
    if whole is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(whole, headers=headers)


async def _pieces(ticket: Ticket) -> AsyncIterator[Piece]:
    """Pieces of the choices in order of arrival."""
    choices = choices_of(ticket.job)
    async for batch in ticket.batches():
        pieces: dict[int, Piece] = {}
        for event in batch:
            choice = choices[event.request_id, event.sample]
            if choice.finish_reason is not None:
                continue  # its stop string was found in the text before the engine found it
            piece = choice.push(event)
            ticket.num_completion_tokens += 1
            pieces[choice.index] = pieces[choice.index].then(piece) if choice.index in pieces else piece
        for piece in pieces.values():
            if not piece.is_empty:
                yield piece
        if all(choice.finish_reason is not None for choice in choices.values()):
            ticket.finished()
            return


async def _whole(ticket: Ticket, writer: ResponseWriter) -> JsonObject:
    async for piece in _pieces(ticket):
        writer.add(piece)
    return writer.whole(ticket.num_completion_tokens)


async def _events(ticket: Ticket, writer: ResponseWriter, includes_usage: bool) -> AsyncIterator[bytes]:
    try:
        async for piece in _pieces(ticket):
            yield writer.chunk(piece)
    except ApiError as error:
        # The status was sent already. OpenAI's clients raise on an event with an error.
        yield server_sent(error.body)
        return
    if includes_usage:
        yield writer.last_chunk(ticket.num_completion_tokens)
    yield DONE


async def _unless_disconnected(request: Request, answer: Coroutine[None, None, JsonObject]) -> JsonObject | None:
    """The answer, or None as soon as the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, watch):
            task.cancel()


class _Stream(StreamingResponse):
    """Closes the ticket however the stream ends: complete, by an error, because the client disconnected, or because it
    stopped reading."""

    def __init__(self, ticket: Ticket, content: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache"})
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._ticket.time_limit_s + SLOW_READER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("%s: the client has stopped reading its stream", self._ticket.job.id)
        finally:
            self._ticket.close()


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
    }


def _public(source: str) -> str:
    """Clients get the name of a folder, not its path."""
    return Path(source).name if Path(source).is_absolute() else source


def _health(service: Service) -> Response:
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
    return JSONResponse(body, 200 if status == "ok" else 503)
