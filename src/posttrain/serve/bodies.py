"""The bodies of responses, whole and in pieces, as OpenAI's clients expect them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from posttrain.serve.choices import Piece, TokenLogprobs, chat_logprobs, completion_logprobs
from posttrain.serve.service import Job

DONE = b"data: [DONE]\n\n"
# `json.dumps` would make one for each of many thousand events a second.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def server_sent(body: dict[str, Any]) -> bytes:
    return b"data: " + _written(body) + b"\n\n"


def _written(body: Any) -> bytes:
    return _ENCODER.encode(body).encode()


@dataclass
class _Told:
    """What a client has heard of one choice."""

    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None


class ResponseWriter:
    """One response of either endpoint. `streams` only changes the name of the object."""

    def __init__(self, job: Job, *, chat: bool, streams: bool, logprobs: bool, includes_usage: bool) -> None:
        self._job = job
        self._chat = chat
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._told: dict[int, _Told] = {}
        kind = ("chat.completion.chunk" if streams else "chat.completion") if chat else "text_completion"
        self._head = {
            "id": job.id,
            "object": kind,
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"posttrain-{job.version.name}",
        }
        # Every event of a stream begins like this: written out once.
        self._opening = b"data: " + _written(self._head)[:-1] + b',"choices":'

    # -- in pieces -----------------------------------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> bytes:
        """The event for one piece of one choice."""
        told = self._told.setdefault(piece.index, _Told())
        first = not told.text and told.finish_reason is None and not told.logprobs
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._chat:
            delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
            choice["delta"] = delta if piece.text or first else {}
        else:
            choice["text"] = piece.text
        if self._logprobs and piece.logprobs:
            choice["logprobs"] = self._logprobs_of(piece.logprobs)
        self.tell(piece)
        usage = b',"usage":null' if self._includes_usage else b""
        return self._opening + _written([choice]) + usage + b"}\n\n"

    def last_chunk(self, completion_tokens: int) -> bytes:
        return server_sent({**self._head, "choices": [], "usage": self._usage(completion_tokens)})

    # -- whole ---------------------------------------------------------------------------------------------------------

    def tell(self, piece: Piece) -> None:
        """Add a piece to what will be said."""
        told = self._told.setdefault(piece.index, _Told())
        told.text += piece.text
        told.logprobs += piece.logprobs
        told.finish_reason = piece.finish_reason

    def whole(self, completion_tokens: int) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(index, told) for index, told in sorted(self._told.items())],
            "usage": self._usage(completion_tokens),
        }

    def _choice(self, index: int, told: _Told) -> dict[str, Any]:
        logprobs = self._logprobs_of(told.logprobs) if self._logprobs else None
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": told.text, "refusal": None}}
            if self._chat
            else {"text": told.text}
        )
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": told.finish_reason}

    def _logprobs_of(self, logprobs: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        write = chat_logprobs if self._chat else completion_logprobs
        return write(self._job.version.tokenizer, logprobs)

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = self._job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
