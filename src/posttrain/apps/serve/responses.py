"""Responses in the format of OpenAI's API: choices built token by token, then whole bodies or events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from posttrain.apps.serve.text import IncrementalText, StopCut, token_bytes
from posttrain.engines.native.session import ModelLogprobs, TokenEvent
from posttrain.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.apps.serve.service import Job

JsonObject = dict[str, object]

DONE = b"data: [DONE]\n\n"
# `json.dumps` would build an encoder for each event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class ListedToken:
    """A token in the `logprobs` of a response."""

    token_id: int
    logprobs: ModelLogprobs
    offset: int  # of its text in the answer; that of the whole character for a part of one


@dataclass(slots=True)  # frozen ones take twice as long to make, and there is one for each token
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
        listed = self._listable(ended_by_string) if self._waiting else ()
        return Piece(self.index, text, listed, self.finish_reason)

    def _listable(self, ended_by_string: bool) -> tuple[ListedToken, ...]:
        """The waiting tokens whose text has been sent, at least in part. Text that may become a stop string is held
        back together with its tokens, so that those of a stop string are never listed.
        """
        if self.finish_reason is not None and not ended_by_string:
            num_listed = len(self._waiting)  # also those without text
        else:
            num_listed = sum(token.offset < self._num_sent for token in self._waiting)  # offsets only grow
        listed, self._waiting = self._waiting[:num_listed], self._waiting[num_listed:]
        return tuple(listed)


class AnswerText:
    """All choices of a response, by engine request and sample."""

    def __init__(self, choices: Mapping[tuple[str, int], ResponseChoice]) -> None:
        self.num_tokens = 0
        self._choices = choices
        self._num_open = len(choices)

    @property
    def is_complete(self) -> bool:
        return not self._num_open

    def push(self, tokens: Sequence[TokenEvent]) -> list[Piece]:
        """At most one piece of each choice, in order of arrival."""
        pieces: dict[int, Piece] = {}
        for token in tokens:
            choice = self._choices[token.request_id, token.sample]
            if choice.finish_reason is not None:
                continue  # its stop string was found in the text before the engine found it
            piece = choice.push(token)
            self.num_tokens += 1
            self._num_open -= piece.finish_reason is not None
            pieces[choice.index] = pieces[choice.index].then(piece) if choice.index in pieces else piece
        return [piece for piece in pieces.values() if not piece.is_empty]


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
    return f"data: {_ENCODER.encode(body)}\n\n".encode()


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
        self._choices: dict[int, _ChoiceSoFar] = {}
        self._begun: set[int] = set()  # choices of which an event was sent
        kind = ("chat.completion.chunk" if streams else "chat.completion") if chat else "text_completion"
        self._head = {
            "id": job.id,
            "object": kind,
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"posttrain-{job.version.name}",
        }
        # What is the same in every event of the stream, encoded once.
        self._opening = f'data: {_ENCODER.encode(self._head)[:-1]},"choices":[{{"index":'
        self._closing = '}],"usage":null}\n\n' if includes_usage else "}]}\n\n"

    # -- in pieces -----------------------------------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> bytes:
        """The event for one piece of one choice."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        text = encode_basestring(piece.text)
        if not self._chat:
            content = f'"text":{text}'
        elif first:
            content = f'"delta":{{"role":"assistant","content":{text}}}'
        else:
            content = f'"delta":{{"content":{text}}}' if piece.text else '"delta":{}'
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        logprobs = "null"
        if self._logprobs and piece.logprobs:
            logprobs = _ENCODER.encode(self._logprobs_of(piece.logprobs))
        choice = f'{piece.index},"finish_reason":{reason},"logprobs":{logprobs},{content}'
        return f"{self._opening}{choice}{self._closing}".encode()

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
