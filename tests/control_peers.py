"""A peer of the control port of rank 0 that sends what a test wants, proved or not."""

from __future__ import annotations

import json
import socket
from typing import Any

from posttrain.apps.launch.node.session import Session

LIMIT_S = 30.0  # for an answer of a busy machine


class ControlPeer:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self.lines = self.socket.makefile("rb")
        self.challenge: dict[str, Any] = json.loads(self.lines.readline())

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def session(self, secret: bytes, rank: object = 1, run: str = "run", nonce: str = "of the member") -> Session:
        nonces = (self.challenge["nonce"], nonce)
        return Session(secret, is_head=False, run=run, rank=rank, attempt=self.challenge["attempt"], nonces=nonces)

    def join_line(self, session: Session, nonce: str = "of the member", **changed: object) -> bytes:
        own = {"type": "join", "run": session.run, "rank": session.rank, "nonce": nonce, "proof": session.proof}
        return json.dumps({**own, **changed}).encode() + b"\n"

    def join(self, secret: bytes, rank: object = 1, run: str = "run") -> Session:
        session = self.session(secret, rank, run)
        self.send(self.join_line(session))
        return session

    def rest(self) -> bytes:
        """What it answers until it closes the connection."""
        found = b""
        try:
            while piece := self.socket.recv(65536):
                found += piece
        except ConnectionError:
            pass
        return found

    def close(self) -> None:
        self.lines.close()
        self.socket.close()
