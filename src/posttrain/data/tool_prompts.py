"""Writes conversations with tools: their schemas, earlier calls, their results, reasoning. From messages in the format
of OpenAI's API to the text of a prompt.

A chat template that supports tools (its output changes when tools are passed) writes them in the format of its model.
For other templates a system message describes them and the format of a call. What a template expects of a message with
calls (arguments as an object or a text, content as an empty text or none) is found by rendering an example. For
templates that leave calls out, they are written into the content.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain.data.chat import ChatFormat, shared_length
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import FORMATS, AnswerFormat, ToolCall, Tools, answer_format, call_id
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION: Message = {"role": "user", "content": "?"}
# Letters and digits only, as in chat.py: no template trims or escapes them.
_NAME, _VALUE, _RESULT = "posttrain2b9e04name", "posttrain2b9e04value", "posttrain2b9e04result"
_PARAMETERS = {"type": "object", "properties": {_VALUE[::-1]: {"type": "string", "description": "?"}}}
_EXAMPLE_TOOL = {"type": "function", "function": {"name": _NAME, "description": "?", "parameters": _PARAMETERS}}


class ToolChat:
    """A chat format with tools. `answers` is the format in which the model answers."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat

    @cached_property
    def writes_tools(self) -> bool:
        try:
            return writes_tools(self.chat, [_EXAMPLE_TOOL])
        except DataError:
            return False

    @cached_property
    def answers(self) -> AnswerFormat:
        template = None if self.chat.template is None else str(self.chat.template)
        found = answer_format(template, writes_tools=self.writes_tools)
        return found if self._is_right(found) else replace(FORMATS[""], reasoning=found.reasoning)

    def _is_right(self, form: AnswerFormat) -> bool:
        """Whether the format reads the call that the template writes in an example. Unknown formats may look alike."""
        if self._example is None or not form.name:
            return True
        text = self._example[2].partition(_RESULT)[0]
        places = [text.rfind(mark, 0, text.index(_VALUE)) for mark in form.opening]
        start = min((place for place in places if place >= 0), default=max(0, text.rfind('{"name"')))
        ends = [end for end in (self.chat.end_of_turn, self.chat.tokenizer.eos_token) if end]
        stop = min((place for end in ends if (place := text.find(end, start)) >= 0), default=len(text))
        return form.parse(text[start:stop]).tool_calls == [ToolCall(_NAME, {_VALUE: _VALUE})]

    def render(self, messages: Sequence[JsonMapping], tools: Tools = (), **kwargs: Any) -> str:
        """The prompt. `kwargs` are passed to the template, such as `enable_thinking`."""
        written = [self._message(message) for message in messages]
        if not tools or self.writes_tools:
            return self.chat.render(written, tools, **kwargs)
        description = describe(tools, self.answers)
        try:
            return self.chat.render(with_description(written, description, self.chat), **kwargs)
        except DataError:  # a template without system messages
            first = next((index for index, message in enumerate(written) if message["role"] == "user"), 0)
            content, opening = written[first]["content"], f"{description}\n\n"
            with_images = [{"type": "text", "text": opening}, *content] if not isinstance(content, str) else None
            written[first] = {**written[first], "content": with_images or f"{opening}{content}"}
            return self.chat.render(written, **kwargs)

    def _message(self, message: JsonMapping) -> Message:
        """A message as the template expects it."""
        found = {name: value for name, value in message.items() if value not in (None, [])} | {
            "content": message.get("content") or ""
        }
        if self.answers.has_channels and (thoughts := found.get("reasoning_content")):
            found["thinking"] = thoughts
            if found.get("tool_calls") and found["content"]:  # the template takes one of the two before a call
                found |= {"thinking": f"{thoughts}\n\n{found['content']}", "content": ""}
        if self.answers.name == "mistral" and "tool_call_id" in found:
            found["tool_call_id"] = _short_id(found["tool_call_id"])
        if found["role"] == "tool":
            return {**found, "role": self._tool_role}
        if not (calls := found.get("tool_calls")):
            return found
        if self._example is None:
            written = "\n".join(self._written(call["function"]) for call in calls)
            content = f"{found['content']}\n{written}" if found["content"] else written
            return {name: value for name, value in found.items() if name != "tool_calls"} | {"content": content}
        as_object, empty, _ = self._example
        found["tool_calls"] = [self._call(call, as_object) for call in calls]
        return {**found, "content": found["content"] or empty}

    def _call(self, call: JsonMapping, as_object: bool) -> JsonObject:
        arguments = call["function"]["arguments"]
        value = parsed_arguments(arguments)
        short = {"id": _short_id(call.get("id") or "")} if self.answers.name == "mistral" else {}
        written = value if as_object else json.dumps(value, ensure_ascii=False)
        return {**call, **short, "type": "function", "function": {**call["function"], "arguments": written}}

    def _written(self, function: JsonMapping) -> str:
        arguments = json.dumps(parsed_arguments(function["arguments"]), ensure_ascii=False)
        form = self.answers if self.answers.written else FORMATS["hermes"]
        return form.write(function["name"], arguments)

    @cached_property
    def _example(self) -> tuple[bool, str | None, str] | None:
        """Whether arguments are objects, what an empty content is, and the text of a conversation with a call; None if
        the template leaves calls out.
        """
        shapes = ((True, ""), (False, ""), (True, None), (False, None)) if self.chat.template is not None else ()
        for as_object, empty in shapes:
            try:
                text = self.chat.render([_QUESTION, _called(as_object, empty), _result("tool")], [_EXAMPLE_TOOL])
            except DataError:
                continue
            if _VALUE in text and _RESULT in text and f'\\"{_VALUE}' not in text:
                return as_object, empty, text
        return None

    @cached_property
    def after_call(self) -> tuple[str, str] | None:
        """What the template writes after the last value of a call: the rest of the call, and the token that ends the
        turn, if there is one. None if it leaves calls out, or they are not read.
        """
        if self._example is None or not self.answers.name:
            return None
        as_object, empty, text = self._example
        try:
            last = self.chat.render([_QUESTION, _called(as_object, empty)], [_EXAMPLE_TOOL], opens_answer=False)
        except DataError:
            return None
        after, at_end = (one.rpartition(_VALUE)[2] for one in (text, last))
        shared = after[: shared_length(after, at_end)]
        ends = self.chat.special_texts - self._call_markers if self.chat.closes_answers else ()
        stop, end = max(((shared.rfind(one), one) for one in ends), default=(-1, ""))
        return (shared[:stop].rstrip(), end) if stop >= 0 else (shared.rstrip(), "")

    @property
    def _call_markers(self) -> frozenset[str]:
        """Markers within an answer. Those that end a part of harmony may end the answer too."""
        return frozenset(self.answers.markers) - {*(self.answers.closing if self.answers.has_channels else ())}

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that, sampled last, have ended the answer: special ones that are no markers within it."""
        return hidden_token_ids(self.chat.tokenizer, self._call_markers).union(self.chat.stop_token_ids)

    @cached_property
    def _tool_role(self) -> str:
        """`tool` if the template supports it, else `user`."""
        if self._example is not None:
            return "tool"
        try:
            turn: Message = {"role": "assistant", "content": "?"}
            return "tool" if _RESULT in self.chat.render([_QUESTION, turn, _result("tool")]) else "user"
        except DataError:
            return "user"


def _called(as_object: bool, content: str | None) -> Message:
    arguments = {_VALUE: _VALUE}
    function = {"name": _NAME, "arguments": arguments if as_object else json.dumps(arguments)}
    call = {"id": call_id("", 0), "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result(role: str) -> Message:
    return {"role": role, "content": _RESULT, "tool_call_id": call_id("", 0), "name": _NAME}


def _short_id(text: str) -> str:
    """The id itself if it is one that Mistral's templates accept."""
    return text if len(text) == 9 and text.isalnum() else call_id(text, 0)


def parsed_arguments(arguments: str | JsonMapping) -> JsonObject:
    """The arguments of a call in a message. A JSON object or its text; DataError for anything else."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise DataError(f"the arguments of a tool call are not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise DataError(f"the arguments of a tool call must be a JSON object, found {str(arguments)[:80]!r}")
    return dict(value)


def writes_tools(chat: ChatFormat, tools: Tools) -> bool:
    """Whether the output of the template depends on tools."""
    return chat.template is not None and chat.render([_QUESTION], tools) != chat.render([_QUESTION])


def with_description(messages: Sequence[Message], description: str, chat: ChatFormat) -> list[Message]:
    """With a description of the tools in the system message."""
    # Without a template, the line breaks are the only separator before the question.
    description += "" if chat.template is not None else "\n\n"
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def describe(tools: Tools, answers: AnswerFormat = FORMATS["hermes"]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = answers if answers.written else FORMATS["hermes"]
    return (
        f"You can use these tools:\n{listed}\n"
        f"To use one, write {form.write('...', '{...}')} and end your turn; the result comes in the next message. "
        "When you know the answer, give it without a tool call."
    )


def hidden_token_ids(tokenizer: PreTrainedTokenizerBase, markers: Collection[str]) -> frozenset[int]:
    """Special tokens that are not part of an answer's text. Markers of calls and reasoning are."""
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(index for token, index in (ids | added).items() if token not in markers)


def answer_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], answers: AnswerFormat) -> str:
    """The text of sampled tokens, as `AnswerFormat.parse` reads it."""
    hidden = hidden_token_ids(tokenizer, answers.markers)
    shown = [token for token in token_ids if token not in hidden]
    return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))
