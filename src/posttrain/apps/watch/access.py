"""Access to the dashboard: the guard in front of the pages, and headers that keep a page from loading or sending
anything.

Without a token, only names of this machine are accepted as Host, so that another page cannot read runs by DNS
rebinding. With a token, every request for data needs it, as a cookie or as `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.apps.serve.options import host_of
from posttrain.files.digests import sha256_of

COOKIE = "posttrain_watch"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Access:
    """`token` None: every user of this machine."""

    def __init__(self, token: str | None, names: Iterable[str] = ()) -> None:
        self._token = token
        self._names = {*LOOPBACK_NAMES, *names}

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def is_token(self, given: str) -> bool:
        # JSON may hold half a surrogate pair, which has no UTF-8.
        return self._token is not None and hmac.compare_digest(
            given.encode("utf-8", "surrogatepass"), self._token.encode()
        )

    @property
    def cookie(self) -> str:
        """The cookie value, stored by a browser instead of the token."""
        return sha256_of(f"posttrain watch {self._token}")

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Status and reason; None if the request may pass."""
        if not self.needs_token:
            name = host_of(headers.get("host", ""))
            return None if name in self._names else (421, f"this server does not answer for the host {name!r}")
        if not path.startswith("/api/") or path == "/api/login":
            return None  # the program itself is public
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(given.strip()):
            return None
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None and hmac.compare_digest(cookie.value.encode(), self.cookie.encode()):
            return None
        return 401, "a token is needed"


class Guard:
    """ASGI middleware: refuses, or lets pass and adds the headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._access.refusal(scope["path"], Headers(scope=scope))
        if refused is not None:
            status, reason = refused
            await JSONResponse({"error": reason}, status)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
