"""Responses in the format of OpenAI's API: choices built token by token, then whole bodies or events of a stream."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.engines.native.session import ModelLogprobs, TokenEvent
from posttrain.serve.text import IncrementalText, StopCut, token_bytes
from posttrain.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.serve.service import Job

JsonObject = dict[str, object]

DONE = b"data: [DONE]\n\n"
# `json.dumps` would build an encoder for each of many thousand events a second.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class ListedToken:
    """A token in the `logprobs` of a response."""

    token_id: int
    logprobs: ModelLogprobs
    offset: int  # of its text in the answer; that of the whole character for a part of one


@dataclass(frozen=True)
class Piece:
    """The next part of a choice. Log-probabilities are sent with the first text of their tokens."""

    index: int
    text: str
    logprobs: tuple[ListedToken, ...]
    finish_reason: FinishReason | None

    def then(self, later: Piece) -> Piece:
        """Two pieces of one choice as one."""
        return Piece(self.index, self.text + later.text, self.logprobs + later.logprobs, later.finish_reason)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.logprobs or self.finish_reason)


class ResponseChoice:
    """One choice of a response: tokens in, pieces of text with their log-probabilities out."""

    def __init__(
        self, index: int, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...], stop_ids: frozenset[int]
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._text = IncrementalText(tokenizer)
        self._cut = StopCut(stop_strings)
        self._stop_ids = stop_ids
        self._waiting: list[ListedToken] = []
        self._length = 0  # characters that all tokens so far have become
        self._num_sent = 0  # of them, those that were sent

    def push(self, event: TokenEvent) -> Piece:
        assert self.finish_reason is None, "a finished choice gets no tokens"
        ends_turn = event.finish_reason == "stop" and event.token_id in self._stop_ids
        text = ""
        if not ends_turn:  # the token that ends the turn is counted, but is not part of the answer
            if event.model_logprobs is not None:
                self._waiting.append(ListedToken(event.token_id, event.model_logprobs, self._length))
            added = self._text.push(event.token_id)
            self._length += len(added)
            text = self._cut.push(added)
        self.finish_reason = "stop" if self._cut.found else event.finish_reason
        if self.finish_reason is not None and not self._cut.found:
            text += self._cut.push(self._text.finish())
            if self._cut.found:
                self.finish_reason = "stop"
            text += self._cut.finish()
        self._num_sent += len(text)
        ended_by_string = self.finish_reason == "stop" and not ends_turn
        return Piece(self.index, text, self._listable(ended_by_string), self.finish_reason)

    def _listable(self, ended_by_string: bool) -> tuple[ListedToken, ...]:
        """The waiting tokens whose text has been sent, at least in part. Text that may become a stop string is held back
        together with its tokens, so that those of a stop string are never listed."""
        if self.finish_reason is not None and not ended_by_string:
            num_listed = len(self._waiting)  # also those without text
        else:
            num_listed = sum(token.offset < self._num_sent for token in self._waiting)  # offsets only grow
        listed, self._waiting = self._waiting[:num_listed], self._waiting[num_listed:]
        return tuple(listed)


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: tuple[ListedToken, ...]) -> JsonObject:
    """In the format of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        raw = token_bytes(tokenizer, token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **entry(token.token_id, token.logprobs.of_token),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.logprobs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: tuple[ListedToken, ...]) -> JsonObject:
    """In the format of /v1/completions."""

    def text(token_id: int) -> str:
        raw = token_bytes(tokenizer, token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # part of a character, in OpenAI's notation
            return "bytes:" + raw.decode("ascii", errors="backslashreplace")

    def top(token: ListedToken) -> dict[str, float]:
        """By text; of two tokens with the same text, the more probable one."""
        found: dict[str, float] = {}
        for token_id, logprob in token.logprobs.top:
            found.setdefault(text(token_id), logprob)
        return found

    return {
        "tokens": [text(token.token_id) for token in tokens],
        "token_logprobs": [token.logprobs.of_token for token in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def server_sent(body: JsonObject) -> bytes:
    return b"data: " + _encoded(body) + b"\n\n"


def _encoded(body: object) -> bytes:
    return _ENCODER.encode(body).encode()


@dataclass
class _ChoiceSoFar:
    """All pieces of one choice together."""

    text: str = ""
    logprobs: tuple[ListedToken, ...] = ()
    finish_reason: str | None = None


class ResponseWriter:
    """One response of either endpoint. `streams` only changes the `object` field."""

    def __init__(self, job: Job, *, chat: bool, streams: bool, logprobs: bool, includes_usage: bool) -> None:
        self._job = job
        self._chat = chat
        self._logprobs = logprobs
        self._includes_usage = includes_usage
        self._choices: dict[int, _ChoiceSoFar] = {}
        kind = ("chat.completion.chunk" if streams else "chat.completion") if chat else "text_completion"
        self._head = {
            "id": job.id,
            "object": kind,
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"posttrain-{job.version.name}",
        }
        # The beginning of every event of the stream, encoded once.
        self._opening = b"data: " + _encoded(self._head)[:-1] + b',"choices":'

    # -- in pieces -----------------------------------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> bytes:
        """The event for one piece of one choice."""
        so_far = self._choices.setdefault(piece.index, _ChoiceSoFar())
        first = not so_far.text and so_far.finish_reason is None and not so_far.logprobs
        choice: JsonObject = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._chat:
            delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
            choice["delta"] = delta if piece.text or first else {}
        else:
            choice["text"] = piece.text
        if self._logprobs and piece.logprobs:
            choice["logprobs"] = self._logprobs_of(piece.logprobs)
        self.add(piece)
        usage = b',"usage":null' if self._includes_usage else b""
        return self._opening + _encoded([choice]) + usage + b"}\n\n"

    def last_chunk(self, completion_tokens: int) -> bytes:
        return server_sent({**self._head, "choices": [], "usage": self._usage(completion_tokens)})

    # -- whole ---------------------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """Append a piece to its choice."""
        so_far = self._choices.setdefault(piece.index, _ChoiceSoFar())
        so_far.text += piece.text
        so_far.logprobs += piece.logprobs
        so_far.finish_reason = piece.finish_reason

    def whole(self, completion_tokens: int) -> JsonObject:
        return {
            **self._head,
            "choices": [self._choice(index, so_far) for index, so_far in sorted(self._choices.items())],
            "usage": self._usage(completion_tokens),
        }

    def _choice(self, index: int, so_far: _ChoiceSoFar) -> JsonObject:
        logprobs = self._logprobs_of(so_far.logprobs) if self._logprobs else None
        content: JsonObject = (
            {"message": {"role": "assistant", "content": so_far.text, "refusal": None}}
            if self._chat
            else {"text": so_far.text}
        )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": so_far.finish_reason}

    def _logprobs_of(self, logprobs: tuple[ListedToken, ...]) -> JsonObject:
        write = chat_logprobs if self._chat else completion_logprobs
        return write(self._job.version.tokenizer, logprobs)

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = self._job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
