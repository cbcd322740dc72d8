"""One choice of a response in the making: tokens in, pieces of text with their log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.engines.native.session import ModelLogprobs, TokenEvent
from posttrain.serve.text import IncrementalText, StopCut, token_bytes
from posttrain.types import FinishReason


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    logprobs: ModelLogprobs
    offset: int  # in the answer, of the text that the token is part of; half characters stand where the character does


@dataclass(frozen=True)
class Piece:
    """What a client hears next of a choice. Log-probabilities travel with the first text of their tokens."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None

    def then(self, later: Piece) -> Piece:
        """Two pieces of one choice as one."""
        return Piece(self.index, self.text + later.text, self.logprobs + later.logprobs, later.finish_reason)

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.logprobs or self.finish_reason)


class Choice:
    def __init__(self, index: int, tokenizer: Any, stop_strings: tuple[str, ...], stop_ids: frozenset[int]) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._text = IncrementalText(tokenizer)
        self._cut = StopCut(stop_strings)
        self._stop_ids = stop_ids
        self._waiting: list[TokenLogprobs] = []
        self._length = 0  # characters that all tokens so far have become
        self._num_told = 0  # of them, those that the client has heard

    def push(self, event: TokenEvent) -> Piece:
        assert self.finish_reason is None, "a finished choice gets no tokens"
        ends_turn = event.finish_reason == "stop" and event.token_id in self._stop_ids
        text = ""
        if not ends_turn:  # the token that ends the turn is counted, and is not part of what was said
            if event.model_logprobs is not None:
                self._waiting.append(TokenLogprobs(event.token_id, event.model_logprobs, self._length))
            added = self._text.push(event.token_id)
            self._length += len(added)
            text = self._cut.push(added)
        self.finish_reason = "stop" if self._cut.found else event.finish_reason
        if self.finish_reason is not None and not self._cut.found:
            text += self._cut.push(self._text.finish())
            if self._cut.found:
                self.finish_reason = "stop"
            text += self._cut.finish()
        self._num_told += len(text)
        ended_by_string = self.finish_reason == "stop" and not ends_turn
        return Piece(self.index, text, self._heard(ended_by_string), self.finish_reason)

    def _heard(self, ended_by_string: bool) -> tuple[TokenLogprobs, ...]:
        """The waiting tokens of which the client has heard at least a part. What may become a stop string waits with its
        tokens, so that those of a stop string are never listed."""
        if self.finish_reason is not None and not ended_by_string:
            num_heard = len(self._waiting)  # also those without text, which nothing comes after
        else:
            num_heard = sum(token.offset < self._num_told for token in self._waiting)  # offsets only grow
        heard, self._waiting = self._waiting[:num_heard], self._waiting[num_heard:]
        return tuple(heard)


def chat_logprobs(tokenizer: Any, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    """As /v1/chat/completions writes them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
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


def completion_logprobs(tokenizer: Any, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    """As /v1/completions writes them."""

    def text(token_id: int) -> str:
        raw = token_bytes(tokenizer, token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # half a character: OpenAI's way to write it
            return "bytes:" + raw.decode("ascii", errors="backslashreplace")

    def top(token: TokenLogprobs) -> dict[str, float]:
        """By text; of two tokens that are written alike, the more probable one."""
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
