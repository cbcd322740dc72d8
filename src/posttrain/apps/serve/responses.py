"""Responses in the format of OpenAI's API: choices built token by token, then whole bodies or events of a stream."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from posttrain.apps.serve.text import IncrementalText, StopCut, token_bytes
from posttrain.data.tool_calls import Answer, AnswerReader, call_id
from posttrain.engines.native.sampler import Candidates
from posttrain.engines.native.session import TokenEvent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.apps.serve.service import Job

JsonObject = dict[str, object]

DONE = b"data: [DONE]\n\n"
# `json.dumps` would build an encoder for each event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class ListedToken:
    """A token in the `logprobs` of a response. All log-probabilities are the sampler's."""

    token_id: int
    logprob: float
    candidates: Candidates
    offset: int  # of its text in the answer; that of the whole character for a part of one


@dataclass(slots=True)  # frozen ones take twice as long to make, and there is one for each token
class Piece:
    """The next part of a choice: some text, reasoning or calls, and the tokens that have come."""

    index: int
    text: str
    logprobs: tuple[ListedToken, ...]
    finish_reason: str | None
    token_ids: tuple[int, ...] = ()
    answer: Answer | None = None  # where calls or reasoning are read; `text` is its content

    def then(self, later: Piece) -> Piece:
        """Two pieces of one choice as one."""
        both = None if self.answer is None or later.answer is None else self.answer + later.answer
        return Piece(
            self.index,
            self.text + later.text,
            self.logprobs + later.logprobs,
            later.finish_reason,
            self.token_ids + later.token_ids,
            both,
        )

    @property
    def is_empty(self) -> bool:
        more = self.answer is not None and (self.answer.reasoning or self.answer.tool_calls)
        return not (self.text or self.logprobs or self.finish_reason or self.token_ids or more)


class ResponseChoice:
    """One choice of a response: tokens in, pieces of text with their log-probabilities out.

    Every token has a log-probability and an id in the response, also one that ends the turn or belongs to a stop
    string. `reader` separates calls and reasoning from the text, in which special tokens but `hidden` are visible.
    """

    def __init__(
        self,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: tuple[str, ...],
        stop_ids: frozenset[int],
        *,
        lists_logprobs: bool = False,
        lists_ids: bool = False,
        reader: AnswerReader | None = None,
        hidden: frozenset[int] | None = None,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._text = IncrementalText(tokenizer, hidden)
        self._cut = StopCut(stop_strings)
        self._stop_ids = stop_ids
        self._lists_logprobs, self._lists_ids = lists_logprobs, lists_ids
        self._reader, self._has_calls = reader, False
        self._length = 0  # characters that all tokens so far have become

    def push(self, event: TokenEvent) -> Piece:
        assert self.finish_reason is None, "a finished choice gets no tokens"
        listed = (ListedToken(event.token_id, event.logprob, event.candidates, self._length),)
        text = ""
        # The token that ends the turn is not part of the text.
        if not (event.finish_reason == "stop" and event.token_id in self._stop_ids):
            added = self._text.push(event.token_id)
            self._length += len(added)
            text = self._cut.push(added)
        reason: str | None = "stop" if self._cut.found else event.finish_reason
        if reason is not None and not self._cut.found:
            text += self._cut.push(self._text.finish())
            if self._cut.found:
                reason = "stop"
            text += self._cut.finish()
        answer = None
        if self._reader is not None:
            answer = self._reader.push(text)
            if reason is not None:
                answer += self._reader.finish()
            text, self._has_calls = answer.content, self._has_calls or bool(answer.tool_calls)
            reason = "tool_calls" if self._has_calls and reason == "stop" else reason
        self.finish_reason = reason
        ids = (event.token_id,) if self._lists_ids else ()
        return Piece(self.index, text, listed if self._lists_logprobs else (), reason, ids, answer)


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


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: tuple[ListedToken, ...], *, as_ids: bool = False
) -> JsonObject:
    """In the format of /v1/chat/completions. `as_ids`: the text of a token is its id."""

    def entry(token_id: int, logprob: float) -> JsonObject:
        raw = token_bytes(tokenizer, token_id)
        text = f"token_id:{token_id}" if as_ids else raw.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.candidates],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: tuple[ListedToken, ...], *, as_ids: bool = False
) -> JsonObject:
    """In the format of /v1/completions. `as_ids`: the text of a token is its id."""

    def text(token_id: int) -> str:
        if as_ids:
            return f"token_id:{token_id}"
        raw = token_bytes(tokenizer, token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # part of a character, in OpenAI's notation
            return "bytes:" + raw.decode("ascii", errors="backslashreplace")

    def top(token: ListedToken) -> dict[str, float]:
        """By text; of two tokens with the same text, the more probable one."""
        found: dict[str, float] = {}
        for token_id, logprob in token.candidates:
            found.setdefault(text(token_id), logprob)
        return found

    return {
        "tokens": [text(token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def server_sent(body: JsonObject) -> bytes:
    return f"data: {_ENCODER.encode(body)}\n\n".encode()


class ResponseWriter:
    """One response of either endpoint. `streams` only changes the `object` field."""

    def __init__(self, job: Job, *, chat: bool, streams: bool, includes_usage: bool) -> None:
        self._job = job
        self._chat = chat
        self._choices: dict[int, Piece] = {}
        self._num_calls: Counter[int] = Counter()  # sent of each choice
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
        self._usage_null = ',"usage":null' if includes_usage else ""

    # -- in pieces -----------------------------------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> bytes:
        """The event for one piece of one choice."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        text = encode_basestring(piece.text)
        if not self._chat:
            content = f'"text":{text}'
        elif piece.answer is not None:
            content = f'"delta":{_ENCODER.encode(self._delta(piece, piece.answer, first))}'
        elif first:
            content = f'"delta":{{"role":"assistant","content":{text}}}'
        else:
            content = f'"delta":{{"content":{text}}}' if piece.text else '"delta":{}'
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        logprobs = _ENCODER.encode(self._logprobs_of(piece.logprobs)) if piece.logprobs else "null"
        choice = f'{piece.index},"finish_reason":{reason},"logprobs":{logprobs},{content}'
        closing = "}]" + self._usage_null
        if self._job.returns_ids:
            choice += f',"token_ids":{_ENCODER.encode(piece.token_ids)}'
            if first and self._chat:
                closing += f',"prompt_token_ids":{_ENCODER.encode(self._prompt_ids(piece.index))}'
            elif first:
                choice += f',"prompt_token_ids":{_ENCODER.encode(self._prompt_ids(piece.index))}'
        return f"{self._opening}{choice}{closing}}}\n\n".encode()

    def _delta(self, piece: Piece, answer: Answer, first: bool) -> JsonObject:
        delta: JsonObject = {"role": "assistant"} if first else {}
        if piece.text or (first and not answer.tool_calls):
            delta["content"] = piece.text
        if answer.reasoning:
            delta["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            start = self._num_calls[piece.index]
            delta["tool_calls"] = [
                {"index": index, **call.in_message(call_id(self._call_key(piece.index), index))}
                for index, call in enumerate(answer.tool_calls, start)
            ]
            self._num_calls[piece.index] += len(answer.tool_calls)
        return delta

    def last_chunk(self, completion_tokens: int) -> bytes:
        return server_sent({**self._head, "choices": [], "usage": self._usage(completion_tokens)})

    # -- whole ---------------------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """Append a piece to its choice."""
        so_far = self._choices.get(piece.index)
        self._choices[piece.index] = piece if so_far is None else so_far.then(piece)

    def whole(self, completion_tokens: int) -> JsonObject:
        ids = {"prompt_token_ids": self._prompt_ids(0)} if self._job.returns_ids and self._chat else {}
        return {
            **self._head,
            **ids,
            "choices": [self._choice(index, so_far) for index, so_far in sorted(self._choices.items())],
            "usage": self._usage(completion_tokens),
        }

    def _choice(self, index: int, so_far: Piece) -> JsonObject:
        logprobs = self._logprobs_of(so_far.logprobs) if self._job.lists_logprobs else None
        content: JsonObject = {"text": so_far.text}
        if self._chat:
            answer = so_far.answer or Answer(so_far.text)
            content = {"message": {**answer.message(self._call_key(index)), "refusal": None}}
        if self._job.returns_ids:
            content["token_ids"] = so_far.token_ids
            content |= {} if self._chat else {"prompt_token_ids": self._prompt_ids(index)}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": so_far.finish_reason}

    def _call_key(self, index: int) -> str:
        return f"{self._job.id} {index}"

    def _prompt_ids(self, index: int) -> Sequence[int]:
        """The prompt of a choice. Each prompt has as many choices."""
        return self._job.requests[index // self._job.requests[0].num_samples].prompt_ids

    def _logprobs_of(self, logprobs: tuple[ListedToken, ...]) -> JsonObject:
        write = chat_logprobs if self._chat else completion_logprobs
        return write(self._job.version.tokenizer, logprobs, as_ids=self._job.writes_ids)

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = self._job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
