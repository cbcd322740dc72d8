"""Prompts with the tools of their environment, which the dataset need not mention.

A chat template that supports tools (its output changes when tools are passed) writes them in the format of its model.
For other templates, a system message describes them and the format of a call (environments/turns/tools.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from posttrain.data.chat import ChatFormat
from posttrain.rollouts.fresh import DrawnTasks, TaskStream
from posttrain.types import Message, Task

Tools = Sequence[Mapping[str, object]]  # JSON schemas, OpenAI's format


class ToolPrompts:
    """The tasks of a stream; those of an environment with tools get a prompt that describes them."""

    def __init__(
        self, stream: TaskStream, chat: ChatFormat, names: frozenset[str], tools_of: Callable[[str], Tools]
    ) -> None:
        self.stream = stream
        self._chat = chat
        self._names = names  # of the environments that may have tools; `tools_of` is called once for each
        self._tools_of = tools_of
        self._writers: dict[str, ToolWriter | None] = {}

    def take(self, count: int) -> list[Task]:
        return [self._with_tools(task) for task in self.stream.take(count)]

    def item(self, position: int) -> Task:
        assert isinstance(self.stream, DrawnTasks), "rounds are over a stream of training data"
        return self._with_tools(self.stream.item(position))

    def _with_tools(self, task: Task) -> Task:
        name = task.environment
        if name not in self._names:
            return task
        if name not in self._writers:
            tools = self._tools_of(name)
            self._writers[name] = ToolWriter(self._chat, tools) if tools else None
        writer = self._writers[name]
        if writer is None:
            return task
        messages = writer.messages(task.messages)
        text, ids = writer.chat.prompt(messages)
        return replace(task, prompt=text, prompt_ids=tuple(ids), messages=tuple(messages))


class ToolWriter:
    """Adds the tools of one environment to a prompt: `chat` renders the conversation that `messages` returns."""

    def __init__(self, chat: ChatFormat, tools: Tools) -> None:
        self.chat, self._described = chat, ""
        if chat.template is not None:
            aware = ChatFormat(chat.tokenizer, chat.template, {**chat.kwargs, "tools": [dict(tool) for tool in tools]})
            question: list[Message] = [{"role": "user", "content": "?"}]
            if aware.render(question) != chat.render(question):
                self.chat = aware
                return
        # Without a template, this is the only separator before the question.
        self._described = describe(tools) + ("" if chat.template is not None else "\n\n")

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        if not self._described:
            return list(messages)
        first = messages[0]
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{self._described}"}, *messages[1:]]
        return [{"role": "system", "content": self._described}, *messages]


def describe(tools: Tools) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can use these tools:\n{listed}\n"
        'To use one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call> and end your turn; the result comes in the '
        "next message. When you know the answer, give it without a tool call."
    )
