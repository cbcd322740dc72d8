"""The control port of rank 0, tried by peers without the secret of the run, and by peers that misuse it."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from control_peers import LIMIT_S, ControlPeer

from posttrain.apps.launch.node import control
from posttrain.apps.launch.node.control import Link, Listener, connect
from posttrain.apps.launch.node.session import Message, Session, Unproved, as_exit_code, as_seconds, parse, ray_token

SECRET = b"5ec" * 21
OTHER = b"07e" * 21


class Head:
    """A listener, and what reaches the member behind it."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.closed: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.said: list[str] = []
        self.listener = Listener(
            0,
            SECRET,
            "an attempt",
            self.joined.put,
            lambda link, message: self.messages.put(message),
            self.closed.put,
            self.said.append,
            host="127.0.0.1",
        )

    def peer(self) -> ControlPeer:
        return ControlPeer(self.listener.port)

    def joined_peer(self) -> tuple[ControlPeer, Session]:
        peer = self.peer()
        session = peer.join(SECRET)
        self.joined.get(timeout=LIMIT_S)
        return peer, session

    def is_untouched(self) -> bool:
        return self.joined.empty() and self.messages.empty()


@pytest.fixture
def head() -> Iterator[Head]:
    scene = Head()
    yield scene
    scene.listener.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_member_that_made_room_while_it_proved_does_not_join(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed: it would join and be gone at once, which ends the attempt."""
    prove = head.listener._prove

    def cut(connection: socket.socket) -> Link:
        link = prove(connection)
        del head.listener._unproved[connection]  # as `_accept` does with the oldest
        return link

    monkeypatch.setattr(head.listener, "_prove", cut)
    with suppress(OSError, ValueError, Unproved):
        head.peer().join(SECRET)
    until(lambda: head.listener.num_refused == 1)
    assert head.is_untouched()


# -- before the proof
# ----------------------------------------------------------------------------------------------------


def _replayed(head: Head, peer: ControlPeer) -> bytes:
    first = head.peer()
    return first.join_line(first.session(SECRET))


def _line(**fields: object) -> Callable[[Head, ControlPeer], bytes]:
    return lambda head, peer: json.dumps(fields).encode() + b"\n"


def _proved(**changed: object) -> Callable[[Head, ControlPeer], bytes]:
    return lambda head, peer: peer.join_line(peer.session(SECRET), **changed)


ATTACKS: dict[str, Callable[[Head, ControlPeer], bytes]] = {
    "the join of older members": _line(type="join", run="run", rank=1),
    "the driver of older members": _line(type="join", run="x", rank="driver"),
    "a failure without a join": _line(type="failed", code=0, why="done"),
    "a notice without a join": _line(type="notice", source="x", seconds=0, is_final=True),
    "the secret of another run": lambda head, peer: peer.join_line(peer.session(OTHER)),
    "no secret": lambda head, peer: peer.join_line(peer.session(b"")),
    "a replayed join": _replayed,
    "the proof of another rank": _proved(rank=2),
    "the proof of a rank as text": _proved(rank="1"),
    "the proof of another run": _proved(run="other"),
    "the proof for another nonce": _proved(nonce="another"),
    "the head's nonce reflected": lambda head, peer: peer.join_line(
        peer.session(SECRET), nonce=peer.challenge["nonce"], proof=peer.challenge["nonce"]
    ),
    "the challenge sent back": lambda head, peer: json.dumps(peer.challenge).encode() + b"\n",
    "a proof that is a number": _proved(proof=0),
    "a proof with a surrogate": lambda head, peer: (
        b'{"type":"join","run":"r","rank":1,"nonce":"n","proof":"\\ud800"}\n'
    ),
    "an empty proof": _proved(proof=""),
    "a sealed line without a join": lambda head, peer: peer.session(SECRET).seal({"type": "failed", "code": 1}),
    "no UTF-8": lambda head, peer: b"\xff\xfe{}\n",
    "no JSON": lambda head, peer: b"GET / HTTP/1.1\r\n\r\n",
    "no object": lambda head, peer: b"[]\n",
    "an empty line": lambda head, peer: b"\n",
    "not a number": lambda head, peer: b'{"type":"join","run":"r","rank":NaN,"nonce":"n","proof":""}\n',
    "deep nesting": lambda head, peer: b"[" * 1000 + b"\n",
    "a long line": lambda head, peer: b"x" * 100_000 + b"\n",
    "a long line without an end": lambda head, peer: b"x" * 1_000_000,
    "a proof in capitals": lambda head, peer: _changed_proof(peer, str.upper),
    "a proof with a space behind it": lambda head, peer: _changed_proof(peer, lambda proof: f"{proof} "),
    "a right join behind a wrong one": lambda head, peer: (
        peer.join_line(peer.session(OTHER)) + peer.join_line(peer.session(SECRET))
    ),
    "a right join behind an empty line": lambda head, peer: b"\n" + peer.join_line(peer.session(SECRET)),
    "a right join in UTF-16": lambda head, peer: peer.join_line(peer.session(SECRET)).decode().encode("utf-16"),
    "a rank that is given twice": lambda head, peer: (
        peer.join_line(peer.session(SECRET)).rstrip(b"}\n") + b', "rank": 2}\n'
    ),
    "an infinite rank": lambda head, peer: b'{"type":"join","run":"r","rank":1e400,"nonce":"n","proof":"p"}\n',
    "a rank of 900 digits": _line(type="join", run="r", rank=10**900, nonce="n", proof="p"),
    "a rank that is an object": _line(type="join", run="r", rank={"a": [1]}, nonce="n", proof="p"),
    "a run with half a surrogate": _line(type="join", run="\ud800", rank=1, nonce="\udfff", proof="p"),
    "the greeting of TLS": lambda head, peer: bytes.fromhex("16030102000100") + b"\n" + bytes(600),
}


def _changed_proof(peer: ControlPeer, change: Callable[[str], str]) -> bytes:
    session = peer.session(SECRET)
    return peer.join_line(session, proof=change(session.proof))


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_is_unproved_is_answered_or_acted_upon(head: Head, attack: str) -> None:
    peer = head.peer()
    with suppress(ConnectionError):  # refused before the end of the line
        peer.send(ATTACKS[attack](head, peer))
    assert peer.rest() == b"", "closed without a word"
    assert head.is_untouched()
    until(lambda: bool(head.said))
    assert "127.0.0.1" in head.said[0]


def test_a_join_that_is_cut_off_is_none(head: Head) -> None:
    peer = head.peer()
    peer.send(peer.join_line(peer.session(SECRET)).rstrip(b"\n"))
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.rest() == b""
    assert head.is_untouched()


def test_a_peer_that_sends_slowly_has_a_deadline(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROVE_S", 0.2)
    peer = head.peer()
    end = time.monotonic() + LIMIT_S
    with suppress(ConnectionError):  # each byte comes in time, the line does not
        while time.monotonic() < end:
            peer.send(b" ")
            time.sleep(0.01)
    assert time.monotonic() < end, "it was never refused"
    assert head.is_untouched()


def test_idle_peers_do_not_keep_a_member_out(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_UNPROVED", 8)
    idle = [head.peer() for _ in range(20)]
    _, session = head.joined_peer()
    assert session.rank == 1
    until(lambda: head.listener.num_refused == 20 - 7)
    assert len(head.said) == 1, "refusals do not fill the log"
    for peer in idle:
        peer.close()


def test_resets_do_not_end_the_listener(head: Head) -> None:
    for _ in range(50):
        hasty = socket.create_connection(("127.0.0.1", head.listener.port), timeout=LIMIT_S)
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hasty.close()
    head.joined_peer()


# -- after it
# -------------------------------------------------------------------------------------------------------


def test_a_proved_peer_is_heard_and_knows_the_head(head: Head) -> None:
    peer = head.peer()
    session = peer.join(SECRET)
    link = head.joined.get(timeout=LIMIT_S)
    assert (link.session.run, link.session.rank, link.session.attempt) == ("run", 1, "an attempt")
    link.send({"type": "welcome", "rank": 1})
    while (message := session.unseal(peer.lines.readline()[:-1]))["type"] == "ping":
        pass
    assert message == {"type": "welcome", "rank": 1}
    peer.send(session.seal({"type": "notice", "seconds": None}))
    assert head.messages.get(timeout=LIMIT_S) == {"type": "notice", "seconds": None}


def _twice(session: Session) -> bytes:
    return session.seal({"type": "notice"}) * 2


def _in_another_order(session: Session) -> bytes:
    lines = [session.seal({"type": name}) for name in ("first", "second")]
    return lines[1] + lines[0]


def _tampered(session: Session) -> bytes:
    return session.seal({"type": "failed", "code": 1}).replace(b"1}", b"0}")


def _from_the_head(session: Session) -> bytes:
    session._own = "head"
    return session.seal({"type": "failed", "code": 1})


MISUSE: dict[str, tuple[Callable[[Session], bytes], int]] = {
    "a line twice": (_twice, 1),
    "another order": (_in_another_order, 0),
    "a changed line": (_tampered, 0),
    "a line of the head": (_from_the_head, 0),
    "plain JSON": (lambda session: b'{"type":"failed","code":0,"why":""}\n', 0),
    "no UTF-8": (lambda session: b"\xff" * 80 + b"\n", 0),
    "not a number": (lambda session: session.seal({"type": "failed", "code": float("nan")}), 0),
    "a cut-off line": (lambda session: session.seal({"type": "failed", "code": 1})[:-1], 0),
    "a long line": (lambda session: session.seal({"type": "failed", "why": "x" * 100_000}), 0),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_a_line_that_is_not_the_next_of_the_peer_ends_its_connection(head: Head, misuse: str) -> None:
    peer, session = head.joined_peer()
    lines, num_heard = MISUSE[misuse]
    try:
        peer.send(lines(session))
        peer.socket.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the head has closed it
    head.closed.get(timeout=LIMIT_S)
    assert head.messages.qsize() == num_heard


@pytest.mark.parametrize("code", [0, -1, 256, 2**70, 1.0, "1", "0", None, True, float("nan"), [1]])
def test_only_what_a_process_can_fail_with_is_a_code_of_a_failure(code: Any) -> None:
    with pytest.raises(ValueError):
        as_exit_code(code, least=1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True, [], 10**400])
def test_only_finite_numbers_are_seconds(seconds: Any) -> None:
    with pytest.raises(ValueError):
        as_seconds(seconds)


def test_parts_of_a_proof_cannot_be_shifted() -> None:
    def proof(run: str, rank: object) -> str:
        return Session(SECRET, is_head=False, run=run, rank=rank, attempt="", nonces=("", "")).proof

    assert len({proof("a", "b"), proof("ab", ""), proof("a", 1), proof("a", "1"), proof("a", None)}) == 5
    assert ray_token(SECRET, "a") != ray_token(SECRET, "b")


def test_nesting_is_no_message() -> None:
    with pytest.raises(ValueError):
        parse(b'{"type": ' + b"[" * 50_000)


# -- a head without the secret
# --------------------------------------------------------------------------------------------


def _answer_with(reply: Callable[[dict[str, Any]], bytes]) -> int:
    """A server that answers the first join with `reply`, and then listens no more. Returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        server.close()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b'{"type": "challenge", "attempt": "a", "nonce": "n"}\n')
            connection.sendall(reply(json.loads(lines.readline())))
            with suppress(ConnectionError):
                lines.readline()

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def _of_other_secret(join: dict[str, Any]) -> bytes:
    nonces = ("n", join["nonce"])
    return Session(OTHER, is_head=True, run="run", rank=1, attempt="a", nonces=nonces).seal({"type": "welcome"})


FALSE_HEADS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "plain": lambda join: b'{"type": "welcome", "rank": 1}\n',
    "the proof of the member": lambda join: f'{join["proof"]} {{"type": "welcome", "rank": 1}}\n'.encode(),
    "another secret": _of_other_secret,
    "the join sent back": lambda join: json.dumps(join).encode() + b"\n",
    "a long line": lambda join: b"x" * 200_000,
}


@pytest.mark.parametrize("head", FALSE_HEADS)
def test_a_member_does_not_follow_a_head_without_the_secret(head: str) -> None:
    said: list[str] = []
    heard: list[Message] = []
    port = _answer_with(FALSE_HEADS[head])
    found = connect(
        "127.0.0.1",
        port,
        SECRET,
        "run",
        1,
        lambda link, message: heard.append(message),
        lambda link: None,
        limit_s=0.0,
        say=said.append,
    )
    assert found is None
    assert heard == []
    assert "has not proved the secret of this run" in said[-1]


def test_a_member_with_another_secret_is_told_so(head: Head) -> None:
    said: list[str] = []
    port = head.listener.port
    assert (
        connect(
            "127.0.0.1",
            port,
            OTHER,
            "run",
            1,
            lambda link, message: None,
            lambda link: None,
            limit_s=0.0,
            say=said.append,
        )
        is None
    )
    assert "has it another secret?" in said[-1]


def test_a_session_refuses_what_another_one_sealed() -> None:
    nonces = ("n", "m")
    one = Session(SECRET, is_head=True, run="run", rank=1, attempt="a", nonces=nonces)
    next_attempt = Session(SECRET, is_head=False, run="run", rank=1, attempt="b", nonces=nonces)
    with pytest.raises(Unproved):
        next_attempt.unseal(one.seal({"type": "stop", "code": 0})[:-1])
