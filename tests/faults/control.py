"""The control port of rank 0, tried by peers without the secret of the run, and by members that send nonsense."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from control_peers import ControlPeer
from gangs import FOREVER, SECRET, WAIT_S, Gang

from faults.campaign import Case, Part
from faults.lab import Lab
from posttrain.apps.launch.node.control import MAX_UNPROVED, PROVE_S

OWN, FOREIGN = SECRET.encode(), b"of another run, which is as long as this one"
MAX_HEAD_MB = 150  # it is a process of 50
GREETINGS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes.fromhex("1603010200010001fc0303"), b"SSH-2.0-x\r\n", b"\n")
ODD = (
    b"null", b"[]", b"{}", b"1", b'"x"', b"NaN", b"-Infinity", b'{"type":null}', b'{"type":"join"}', b"[" * 1000,
    b'{"type":"failed","code":0,"why":"x"}', b'{"type":"join","run":"x","rank":"driver"}', b"\xff\xfe{\x00}\x00",
    b'{"type":"join","run":"run","rank":1}', b'{"type":"join","rank":' + b"9" * 900 + b"}",
)  # fmt: skip
Line = Callable[[ControlPeer, random.Random], bytes]


def _replayed(gang: Gang) -> Line:
    recorded = ControlPeer(gang.control_port)
    line = recorded.join_line(recorded.session(OWN))
    return lambda peer, chance: line


def _cut_off(peer: ControlPeer, chance: random.Random) -> bytes:
    line = peer.join_line(peer.session(OWN))
    return line[: chance.randrange(len(line) - 1)]


def _flipped(peer: ControlPeer, chance: random.Random) -> bytes:
    line = bytearray(peer.join_line(peer.session(OWN)))
    line[chance.randrange(len(line) - 1)] ^= 1 << chance.randrange(8)
    return bytes(line)


def _other_rank(peer: ControlPeer, chance: random.Random) -> bytes:
    return peer.join_line(peer.session(OWN), rank=chance.choice([0, 2, -1, "1", None, True, [1], 1.5, "driver"]))


def _reflected(peer: ControlPeer, chance: random.Random) -> bytes:
    nonce = peer.challenge["nonce"]
    proof = chance.choice([nonce, peer.challenge["attempt"], peer.session(FOREIGN).proof, "", nonce[::-1]])
    return peer.join_line(peer.session(FOREIGN), nonce=nonce, proof=proof)


LINES: dict[str, tuple[int, Line]] = {
    "cut-off": (100, _cut_off),
    "one-bit": (500, _flipped),
    "other-rank": (50, _other_rank),
    "reflected": (50, _reflected),
    "other-secret": (
        50,
        lambda peer, chance: peer.join_line(peer.session(FOREIGN, chance.choice([1, "driver", None]))),
    ),
    "random-bytes": (500, lambda peer, chance: chance.randbytes(chance.randrange(1, 900)) + b"\n"),
    "odd-json": (50, lambda peer, chance: chance.choice(ODD) + b"\n"),
    "greetings": (20, lambda peer, chance: chance.choice(GREETINGS)),
    "long-lines": (10, lambda peer, chance: b"x" * 10_000_000),
}


@contextmanager
def _head(folder: Path, script: str = FOREVER, **more: str) -> Iterator[Gang]:
    gang = Gang(folder)
    try:
        gang.script(script)
        gang.start(0, **more)
        yield gang
        assert SECRET not in gang.logs(), "the secret is in a log"
    finally:
        gang.close()


def _is_untouched(gang: Gang) -> None:
    log = gang.logs()
    assert gang.pods[0].poll() is None, f"the head has ended: {log}"
    assert "has joined" not in log, log
    assert len(log) < 2000, f"refusals fill the log: {log}"
    used = psutil.Process(gang.pods[0].pid).memory_info().rss / 2**20
    assert used < MAX_HEAD_MB, f"the head holds {used:.0f} MB"


def unproved(name: str, tries: int, folder: Path, chance: random.Random) -> None:
    with _head(folder) as gang:
        line = _replayed(gang) if name == "replayed" else LINES[name][1]
        for _ in range(tries):
            peer = ControlPeer(gang.control_port)
            with suppress(OSError):  # it has been refused already
                peer.send(line(peer, chance))
                peer.socket.shutdown(socket.SHUT_WR)
            assert peer.rest() == b"", "an unproved peer got an answer"
            peer.close()
        _is_untouched(gang)


def resets(tries: int, folder: Path, chance: random.Random) -> None:
    with _head(folder) as gang:
        for _ in range(tries):
            peer = socket.create_connection(("127.0.0.1", gang.control_port), timeout=WAIT_S)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        _is_untouched(gang)


def slow(tries: int, folder: Path, chance: random.Random) -> None:
    """A byte now and then: every connection has ended when the time for the proof is over."""
    with _head(folder) as gang:
        peers = [socket.create_connection(("127.0.0.1", gang.control_port), timeout=WAIT_S) for _ in range(tries)]
        end = time.monotonic() + PROVE_S + WAIT_S
        while peers:
            assert time.monotonic() < end, f"{len(peers)} slow connections are still open"
            for peer in list(peers):
                try:
                    peer.sendall(b" ")
                except OSError:
                    peers.remove(peer)
            time.sleep(0.2)
        _is_untouched(gang)


def flood(tries: int, folder: Path, chance: random.Random) -> None:
    """A member joins while others open one connection after another, and hold them."""
    with _head(folder, "while not os.path.exists(folder + '/ray_worker'): time.sleep(0.02)") as gang:
        port, over, held = gang.control_port, threading.Event(), []

        def open_more() -> None:
            while not over.is_set():
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                if len(held) > tries:
                    held.pop(0).close()
                    time.sleep(0.005)

        thread = threading.Thread(target=open_more, daemon=True)
        thread.start()
        gang.until(lambda: len(held) >= tries, "the flood")
        gang.start(1)
        codes = gang.codes()
        over.set()
        thread.join()
        for one in held:
            one.close()
        assert codes == {0: 0, 1: 0}, gang.logs()


def proved(message: dict[str, Any], folder: Path, chance: random.Random) -> None:
    """A member with the secret that sends nonsense fails; the run never ends as if it were done."""
    with _head(folder, POSTTRAIN_NUM_NODES="3") as gang:
        peer = ControlPeer(gang.control_port)
        peer.send(peer.join(OWN).seal(message))
        code = gang.pods[0].wait(WAIT_S)
        assert code in (1, 85), f"exit code {code}: {gang.logs()}"
        assert "Traceback" not in gang.logs(), gang.logs()


CODES = (0, -1, 256, 512, float("nan"), float("-inf"), "0", True, None, [0], 0.0, 10**30)
SECONDS = (float("nan"), float("inf"), -5, "1", 1e308, True, [], 10**400)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name, (tries, _) in {"replayed": (50, None), **LINES}.items():
        tries = min(tries, 5) if short else tries
        yield Case(name, partial(unproved, name, tries), tries)
    yield Case("resets", partial(resets, 50 if short else 1000), 50 if short else 1000)
    if not short:
        yield Case("slow", partial(slow, MAX_UNPROVED + 50), MAX_UNPROVED + 50)
        yield Case("flood", partial(flood, 800), 800)
    messages = [{"type": "failed", "code": code, "why": "x"} for code in CODES]
    messages += [{"type": "notice", "source": "x", "seconds": left, "is_final": True} for left in SECONDS]
    messages += [{"type": "failed"}, {"type": "notice"}]
    for message in messages[:1] if short else messages:
        yield Case(f"proved:{json.dumps(message)[:60]}", partial(proved, message))


PART = Part(
    "control",
    "Only pods with the secret of a run can join it, read its token or end it, and a failure never counts as done",
    cases,
    minutes=1,
)
