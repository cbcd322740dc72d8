"""The connections of a gang: every member has one to rank 0, over which one line is one message (`session.py`).

When a process ends, its machine closes the connection, and the other side reads the end of file immediately. A machine
that fails does not close connections: then pings stop, and after `SILENCE_S` the connection counts as closed.

Anything in the cluster's network may connect to rank 0. Before a connection has proved the secret of the run, nothing
that it sends is acted upon, and its lines, its time and the number of such connections are limited.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from posttrain.apps.launch.node.session import LONGEST_JOIN, LONGEST_LINE, Message, Session, new_nonce, parse
from posttrain.errors import reason_of

PING_S = 1.0
SILENCE_S = 15.0
PROVE_S = 10.0  # for a connection to prove the secret
MAX_UNPROVED = 256  # connections at a time; the oldest makes room for another
_WELCOME_S = 30.0  # for rank 0 to answer
_RETRY_S = 0.2
_RETRY_REFUSED_S = 1.0
_SAY_S = 30.0

Receive = Callable[["Link", Message], None]
Closed = Callable[["Link"], None]
Say = Callable[[str], None]


class _Lines:
    """Lines that arrive on a connection, with limits of length and time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()  # the timeout of the connection is for sending
        self._poll.register(connection, select.POLLIN)
        self._buffer = b""

    def next(self, longest: int, limit_s: float) -> bytes:
        """OSError after the end of the stream or of the time; ValueError if the line is too long."""
        end = time.monotonic() + limit_s
        while (place := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > longest:
                break
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._poll.poll(left_s * 1000):
                raise TimeoutError(f"no line within {limit_s:.0f} s")
            piece = self._connection.recv(16384)
            if not piece:
                raise ConnectionError("the connection was closed")
            self._buffer += piece
        if not 0 <= place <= longest:
            raise ValueError("the line is too long")
        line, self._buffer = self._buffer[:place], self._buffer[place + 1 :]
        return line


class Link:
    """One connection whose other end has proved the secret. `receive` and `closed` are called in a separate thread."""

    def __init__(
        self,
        connection: socket.socket,
        lines: _Lines,
        session: Session,
        receive: Receive,
        closed: Closed,
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.own_address = str(connection.getsockname()[0])
        self.peer_address = str(connection.getpeername()[0])
        self.session = session
        self._connection, self._lines = connection, lines
        self._receive, self._closed = receive, closed
        self._ping_s, self._silence_s = ping_s, silence_s
        self._sending = threading.Lock()
        self._over = threading.Event()
        connection.settimeout(silence_s)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        threading.Thread(target=self.read, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """A closed connection is no error: its end is reported to `closed`."""
        with self._sending, suppress(OSError):
            self._connection.sendall(self.session.seal(message))

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ping(self) -> None:
        while not self._over.wait(self._ping_s):
            self.send({"type": "ping"})

    def read(self) -> None:
        """Until the connection ends, or something arrives that the other end of this session did not send."""
        threading.Thread(target=self._ping, name="ping", daemon=True).start()
        try:
            with self._connection:
                while True:
                    message = self.session.unseal(self._lines.next(LONGEST_LINE, self._silence_s))
                    if message["type"] != "ping":
                        self._receive(self, message)
        except (OSError, ValueError):
            pass  # cut off, silent, or not from the other end
        finally:
            self._over.set()
            self._closed(self)


class Listener:
    """Accepts connections on `port` (0: any that is free). `joined` gets those that have proved the secret."""

    def __init__(
        self,
        port: int,
        secret: bytes,
        attempt: str,
        joined: Callable[[Link], None],
        receive: Receive,
        closed: Closed,
        say: Say,
        host: str = "",
    ) -> None:
        self._server = socket.create_server((host, port), backlog=1024)
        self.port = int(self._server.getsockname()[1])
        self._secret, self._attempt = secret, attempt
        self._joined, self._receive, self._closed, self._say = joined, receive, closed, say
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, None] = {}  # in the order of their arrival
        self.num_refused = 0
        self._say_at = 0.0
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(_RETRY_S)  # the connection was reset, or there is no free descriptor at the moment
                continue
            with self._lock:
                oldest = next(iter(self._unproved)) if len(self._unproved) >= MAX_UNPROVED else None
                self._unproved[connection] = None
                if oldest is not None:
                    del self._unproved[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._serve, args=(connection, address), name="control", daemon=True).start()
            except RuntimeError:  # no thread can be started at the moment
                self._refuse(connection, address, "too many threads")

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(PROVE_S)
            link = self._prove(connection)
        except OSError as error:
            self._refuse(connection, address, reason_of(error))
        except (ValueError, KeyError, TypeError):
            self._refuse(connection, address, "it has not proved the secret of this run")
        else:
            with self._lock:
                was_cut = connection not in self._unproved  # it made room for others while it proved
                self._unproved.pop(connection, None)
            if was_cut:
                self._refuse(connection, address, "too many connections at once")
                return
            self._joined(link)
            link.read()

    def _prove(self, connection: socket.socket) -> Link:
        lines, nonce = _Lines(connection), new_nonce()
        challenge = {"type": "challenge", "attempt": self._attempt, "nonce": nonce}
        connection.sendall(json.dumps(challenge).encode() + b"\n")
        join = parse(lines.next(LONGEST_JOIN, PROVE_S))
        run, own_nonce = join["run"], join["nonce"]
        if join["type"] != "join" or not isinstance(run, str) or not isinstance(own_nonce, str):
            raise ValueError("no join")
        session = Session(
            self._secret,
            is_head=True,
            run=run,
            rank=join["rank"],
            attempt=self._attempt,
            nonces=(nonce, own_nonce),
        )
        if not session.is_proof(join["proof"]):
            raise ValueError("no proof")
        return Link(connection, lines, session, self._receive, self._closed)

    def _refuse(self, connection: socket.socket, address: str, why: str) -> None:
        """Reported at intervals only: connections that prove nothing must not fill the log."""
        connection.close()
        with self._lock:
            self._unproved.pop(connection, None)
            self.num_refused += 1
            count, now = self.num_refused, time.monotonic()
            if now < self._say_at:
                return
            self._say_at = now + _SAY_S
        self._say(f"refused {count} connection{'s' if count > 1 else ''} so far, the last from {address}: {why}")

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # otherwise `accept` would hold the port
        self._server.close()


def connect(
    host: str,
    port: int,
    secret: bytes,
    run: str,
    rank: object,
    receive: Receive,
    closed: Closed,
    *,
    limit_s: float,
    say: Say,
) -> tuple[Link, Message] | None:
    """A connection to rank 0, and its welcome. Rank 0 may still be starting, or end an attempt in which this rank
    exists already, so it is tried again until `limit_s` has passed; then None.
    """
    start = last_said = time.monotonic()
    while True:
        wait_s = _RETRY_S
        try:
            connection = socket.create_connection((host, port), timeout=5.0)
            try:
                return _join(connection, secret, run, rank, receive, closed)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            why = reason_of(error)
        except (ValueError, KeyError, TypeError):
            why = "it has not proved the secret of this run"
        except _Refused as error:
            why, wait_s = str(error), _RETRY_REFUSED_S
        now = time.monotonic()
        if now - start > limit_s:
            say(f"{host}:{port} has not answered for {limit_s:.0f} s: {why}")
            return None
        if now - last_said > _SAY_S:
            last_said = now
            say(f"waiting for rank 0 at {host}:{port}: {why}")
        time.sleep(wait_s)


class _Refused(Exception):
    """By rank 0, which has the secret."""


def _join(
    connection: socket.socket, secret: bytes, run: str, rank: object, receive: Receive, closed: Closed
) -> tuple[Link, Message]:
    connection.settimeout(PROVE_S)
    lines, nonce = _Lines(connection), new_nonce()
    challenge = parse(lines.next(LONGEST_JOIN, PROVE_S))
    attempt, head_nonce = challenge["attempt"], challenge["nonce"]
    if challenge["type"] != "challenge" or not isinstance(attempt, str) or not isinstance(head_nonce, str):
        raise ValueError("no challenge")
    session = Session(secret, is_head=False, run=run, rank=rank, attempt=attempt, nonces=(head_nonce, nonce))
    join = {"type": "join", "run": run, "rank": rank, "nonce": nonce, "proof": session.proof}
    connection.sendall(json.dumps(join).encode() + b"\n")
    end = time.monotonic() + _WELCOME_S
    try:
        while (message := session.unseal(lines.next(LONGEST_LINE, end - time.monotonic())))["type"] == "ping":
            pass
    except ConnectionError as error:
        raise ConnectionError("it closed the connection; has it another secret?") from error
    if message["type"] != "welcome":
        raise _Refused(str(message.get("why")))
    return Link(connection, lines, session, receive, closed), message


def port_is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
