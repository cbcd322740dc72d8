"""A listening TCP socket for the servers of posttrain: the model server and the dashboard."""

from __future__ import annotations

import socket

from posttrain.errors import InputError


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit: asyncio sets TCP_NODELAY only on such sockets. Otherwise each response waits up to 40
    # ms for the client to acknowledge the previous packet.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(f"cannot listen at {host}, port {port}: {error}; --port 0 takes a free one") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
