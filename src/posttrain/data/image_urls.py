"""Fetches an image from a public web server: http and https, with limits of size and time, never a private address.

A name is resolved once, its addresses are checked, and the connection goes to the checked address, so that a name that
resolves differently a moment later leads nowhere. Redirects are checked in the same way. Proxies are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from posttrain.data.errors import DataError
from posttrain.data.images import MAX_IMAGE_BYTES
from posttrain.errors import reason_of

TIMEOUT_S = 30.0  # for one image, with redirects
_MAX_REDIRECTS = 3
# IPv6 addresses that lead to an IPv4 address inside them: NAT64, 6to4, Teredo.
_TUNNELS = tuple(
    ipaddress.ip_network(prefix) for prefix in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)


def fetch_image(url: str, where: str) -> bytes:
    """The bytes at the URL; DataError, which begins with `where`, if they cannot or must not be fetched."""
    until = time.monotonic() + TIMEOUT_S
    address = url
    for _ in range(_MAX_REDIRECTS + 1):
        try:
            answer = _request(urlsplit(address), until)
        except _Refused as error:
            raise DataError(f"{where}: {url[:200]} is not fetched: {error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DataError(f"{where}: {url[:200]} cannot be fetched ({reason_of(error)})") from error
        if isinstance(answer, bytes):
            return answer
        address = urljoin(address, answer)
    raise DataError(f"{where}: {url[:200]} cannot be fetched (more than {_MAX_REDIRECTS} redirects)")


class _Refused(Exception):
    pass


def _request(url: SplitResult, until: float) -> bytes | str:
    """The content, or the address that a redirect names."""
    if url.scheme not in ("http", "https") or not url.hostname:
        raise _Refused(f"a redirect to {url.geturl()[:80]!r}")
    if url.username or url.password:
        raise _Refused("the URL has a user name or a password")
    port = url.port or (443 if url.scheme == "https" else 80)
    checked = public_address(url.hostname, port)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection: Any = kind(url.hostname, port, timeout=_left(until))
    # TLS still checks the certificate of the name.
    connection._create_connection = lambda _, timeout, source: socket.create_connection((checked, port), timeout)
    try:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"User-Agent": "posttrain", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("Location") or ""
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        content = bytearray()
        while chunk := answer.read1(1 << 16):
            content += chunk
            if len(content) > MAX_IMAGE_BYTES:
                raise _Refused(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB")
            _left(until)
        return bytes(content)
    finally:
        connection.close()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise OSError(f"it takes longer than {TIMEOUT_S:g} s")
    return left


def public_address(host: str, port: int) -> str:
    """An address of the host; refused if any of its addresses is private, local or reserved."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in found:
        if not is_public(address):
            raise _Refused(f"{host} has the address {address}, which is not public")
    return min(found)


def is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if any(ip in tunnel for tunnel in _TUNNELS):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
