"""Prompts and responses as one text each: as they are, or, of conversations, their messages as JSON.

The JSON is written in one way only (order of keys, no nulls, no spaces), so that equal conversations are equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.traces import report as reasons
from posttrain.data.traces.values import Message, Response
from posttrain.files.json_files import JsonObject

CALLS = frozenset({"tool_calls", "function_call"})  # what a turn without text may consist of


class Unusable(Exception):
    """A value that makes its row unusable; the argument is the reason."""


def encode_prompt(value: object) -> tuple[str, bool]:
    if isinstance(value, list) and value:
        return _written([_message(turn) for turn in value]), True
    return _plain(value, reasons.NO_PROMPT), False


def encode_response(value: object) -> tuple[str, bool]:
    """A text as it is; the turns up to the assistant's last one; of a single turn that is only text, that text."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        return _plain(value, reasons.NO_RESPONSE), False
    turns = [_message(turn) for turn in value]
    while turns and turns[-1]["role"] != "assistant":  # later turns of others are not part of the answer
        turns.pop()
    if not turns:
        raise Unusable(reasons.NO_RESPONSE)
    only = turns[0]
    if len(turns) == 1 and only.keys() <= {"role", "content"}:
        return _checked(only["content"]), False
    return _written(turns), True


def without_prompt(prompt: str | list[Message], response: str | list[Message]) -> tuple[str, bool]:
    """A response of several turns as `encode_response` writes it; a prompt that it begins with is not part of it."""
    assert not isinstance(response, str)
    if response[0]["role"] != "assistant":
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if response[: len(asked)] != asked:
            raise Unusable(reasons.OTHER_PROMPT)
        response = response[len(asked) :]
    return encode_response(response)


def _plain(value: object, otherwise: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Unusable(reasons.NOT_UNICODE) from error
    if not isinstance(value, str):
        raise Unusable(otherwise)
    return _checked(value)


def split_conversation(messages: object, length: object) -> tuple[str, str, bool]:
    """The prompt and the response of a whole conversation. Length -1: the response is the last turn."""
    if not isinstance(messages, list) or not messages:
        raise Unusable(reasons.BAD_MESSAGES)
    if isinstance(length, float) and length.is_integer():  # Parquet writers turn a column with gaps into floats
        length = int(length)
    if not isinstance(length, int) or isinstance(length, bool):
        raise Unusable(reasons.BAD_PROMPT_LEN)
    if length == -1:
        length = len(messages) - 1
    if not 0 < length < len(messages):
        raise Unusable(reasons.BAD_PROMPT_LEN)
    prompt, _ = encode_prompt(messages[:length])
    response, is_chat = encode_response(messages[length:])
    return prompt, response, is_chat


def _message(turn: object) -> JsonObject:
    """One turn, its keys in one order and without the nulls that tables put where a turn has no such key."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise Unusable(reasons.BAD_MESSAGES)
    content = _content(turn.get("content"))
    rest = {name: _without_nulls(turn[name]) for name in sorted(turn) if name not in ("role", "content")}
    rest = {name: value for name, value in rest.items() if value is not None}
    if content is None and not CALLS & rest.keys():
        raise Unusable(reasons.BAD_MESSAGES)
    return {"role": turn["role"], "content": content, **rest}


def _content(value: object) -> str | None:
    """Text; the texts of a list of parts, one after another, as OpenAI's API has them; None of a turn without text."""
    if isinstance(value, list):
        texts = [part["text"] for part in value if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) == len(value):
            return "".join(texts)
    if value is None or isinstance(value, str):
        return value
    raise Unusable(reasons.BAD_MESSAGES)


def _without_nulls(value: object) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _written(turns: Sequence[Message]) -> str:
    return _checked(json.dumps(turns, ensure_ascii=False, separators=(",", ":"), default=str))


def _checked(text: str) -> str:
    """JSON can contain lone surrogates, which files cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(reasons.NOT_UNICODE) from error
    return text


def decoded(text: str, is_chat: bool) -> Response:
    """What `encode_prompt` or `encode_response` was given."""
    return list(json.loads(text)) if is_chat else text
