"""One HTTP request to a judge, with a strict time limit for the whole request.

Standard library only. Socket timeouts apply to one read, so an endpoint that sends a byte now and then could block
forever. A timer closes the connection when the time limit of the request is reached. Independent of verdicts.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import redact

_MAX_REPLY_BYTES = 8 << 20
_MAY_PASS = frozenset({408, 409, 423, 425, 429, *range(500, 600)})
_SHOWN_CHARACTERS = 200


class EndpointError(Exception):
    """No usable reply. `may_pass`: asking again may help; `retry_after_s`: when, if the endpoint sent it."""

    def __init__(self, message: str, *, may_pass: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class JudgeEndpoint:
    """A URL that takes JSON. Proxies come from the environment, as for other programs (`https_proxy`, `no_proxy`)."""

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)  # may contain an API key

    def post(self, body: JsonObject, limit_s: float) -> bytes:
        """The reply with status 200, or `EndpointError`."""
        connection, target = self._connection(limit_s)
        expired = threading.Event()
        sockets: list[socket.socket] = []  # http.client drops its reference while a reply is still being read

        def expire() -> None:
            expired.set()
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # ends a blocked read

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            sockets.append(connection.sock)
            if expired.is_set():  # before there was a socket to shut down
                raise TimeoutError
            connection.request(
                "POST", target, json.dumps(body).encode(), {"Content-Type": "application/json", **self.headers}
            )
            response = connection.getresponse()
            content = response.read(_MAX_REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise EndpointError(f"no reply within {limit_s:.0f} s", may_pass=True) from None
            raise EndpointError(f"{type(error).__name__}: {error}", may_pass=True) from None
        finally:
            timer.cancel()
            connection.close()
        if expired.is_set():
            raise EndpointError(f"no complete reply within {limit_s:.0f} s", may_pass=True)
        if len(content) > _MAX_REPLY_BYTES:
            raise EndpointError(f"the reply is longer than {_MAX_REPLY_BYTES >> 20} MiB", may_pass=True)
        if response.status != 200:
            raise self._refusal(response, content)
        return content

    def _connection(self, limit_s: float) -> tuple[http.client.HTTPConnection, str]:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = parts.hostname or ""
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        proxy = urllib.request.getproxies().get(parts.scheme)
        if not proxy or urllib.request.proxy_bypass(host):
            return kind(host, parts.port, timeout=limit_s), path
        through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        connection = kind(through.hostname or "", through.port, timeout=limit_s)
        if not secure:
            return connection, self.url
        connection.set_tunnel(host, parts.port)
        return connection, path

    def _refusal(self, response: http.client.HTTPResponse, content: bytes) -> EndpointError:
        # Some servers quote the rejected key. Redact before truncation: a truncated key would not be recognised.
        text = redact(" ".join(content.decode("utf-8", "replace").split()))[:_SHOWN_CHARACTERS]
        return EndpointError(
            f"HTTP {response.status} {response.reason} from {self.url}: {text}".rstrip(": "),
            may_pass=response.status in _MAY_PASS,
            retry_after_s=_retry_after_s(response.getheader("Retry-After")),
        )


def _retry_after_s(header: str | None) -> float | None:
    """Seconds, from a header that has either seconds or a date."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if seconds < 1e6 else None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return None
