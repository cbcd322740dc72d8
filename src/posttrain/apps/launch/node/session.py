"""How both ends of a control connection prove that they have the secret of the run (decision 40).

| line | from | content |
|---|---|---|
| 1 | rank 0 | `{"type": "challenge", "attempt": …, "nonce": …}` |
| 2 | member | `{"type": "join", "run": …, "rank": …, "nonce": …, "proof": …}`; `proof`: HMAC over all above |
| others | both | `HMAC JSON`, by a key of this connection, over the sender, the number of the line and the JSON |

The first line with an HMAC that rank 0 sends proves that it has the secret, too. The secret itself and the token of the
Ray cluster, which both ends derive from it, are never sent.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping

MIN_SECRET_CHARACTERS = 32
LONGEST_LINE = 65536
LONGEST_JOIN = 1024  # of a line from an end that has proved nothing yet
NONCE_BYTES = 32

Message = Mapping[str, object]


class Unproved(ValueError):
    """The line is not one that an end with the secret of this run sends."""


def ray_token(secret: bytes, attempt: str) -> str:
    return _mac(secret, "ray token", attempt).hex()


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def parse(line: bytes) -> Message:
    """ValueError if it is not an object of JSON with a type."""
    try:
        message = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message")
    return message


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def as_exit_code(value: object, least: int = 0) -> int:
    """ValueError unless it is a whole number that a process can end with: 256 would end it with 0."""
    if type(value) is not int or not least <= value <= 255:
        raise ValueError("not an exit code")
    return value


def as_seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e9:  # type: ignore[operator]
        raise ValueError("not a number of seconds")
    return float(value)  # type: ignore[arg-type]


class Session:
    """One connection after the challenge, at one of its ends."""

    def __init__(
        self, secret: bytes, *, is_head: bool, run: str, rank: object, attempt: str, nonces: tuple[str, str]
    ) -> None:
        """`nonces` are that of the head and that of the member."""
        about = (run, rank, attempt, *nonces)
        self.run, self.rank, self.attempt = run, rank, attempt
        self.proof = _mac(secret, "join", *about).hex()
        self._key = _mac(secret, "messages", *about)
        self._own, self._other = ("head", "member") if is_head else ("member", "head")
        self._num_sent = self._num_received = 0

    def is_proof(self, proof: object) -> bool:
        return isinstance(proof, str) and hmac.compare_digest(proof.encode("utf-8", "replace"), self.proof.encode())

    def seal(self, message: Message) -> bytes:
        text = json.dumps(message)
        mac = _mac(self._key, self._own, self._num_sent, text)
        self._num_sent += 1
        return f"{mac.hex()} {text}\n".encode()

    def unseal(self, line: bytes) -> Message:
        """`Unproved` if the other end did not send this as its next line."""
        mac, _, text = line.partition(b" ")
        try:
            expected = _mac(self._key, self._other, self._num_received, text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Unproved("not UTF-8") from error
        if not hmac.compare_digest(mac, expected.hex().encode()):
            raise Unproved("a line without the proof of the run's secret")
        self._num_received += 1
        return parse(text)


def _mac(key: bytes, purpose: str, *parts: object) -> bytes:
    """JSON keeps the parts apart: ("a", "b") and ("ab", "") differ, and so do 1 and "1"."""
    text = json.dumps(["posttrain control 1", purpose, *parts])
    return hmac.digest(key, text.encode(), "sha256")
