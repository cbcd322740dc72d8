"""The prompts of conversations: tools in the first one, and the tokens between two turns of the model.

**Tools**, which the dataset need not mention. A chat template that supports tools (its output changes when tools are
passed) writes them in the format of its model. For other templates, a system message describes them and the format of a
call (data/tool_prompts.py).

**Between two turns**: the end of the model's turn, the observation, the opening of its next turn. Token in, token out:
the prompt of the next turn is the tokens of the last prompt, the tokens that the model sampled, and the tokens made
here. No text that the model has read or sampled is rendered or tokenised again. What the chat template prints around an
observation is found by rendering the conversation with a placeholder for each of the model's turns and keeping what
follows the last one. So the result does not depend on the model's text or on how the template would render it.

Some templates render an earlier turn differently once the conversation continues: they drop its chain of thought, or
move the tools. Training on such text would train on tokens that were not sampled. `caution` is set for these templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from posttrain.data.chat import ChatFormat, Ids, attached
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import Answer, AnyCall, ToolCall, Tools, call_id
from posttrain.data.tool_prompts import ToolChat, answer_text, describe, with_description, writes_tools
from posttrain.files.json_files import JsonMapping
from posttrain.rollouts.fresh import DrawnTasks, TaskStream
from posttrain.types import Message, Task

# Letters and digits only, as in chat.py: no template trims or escapes it, and no observation holds it by chance.
_PLACEHOLDER = "posttrain5d0c8e17b2turn"
TURN: Message = {"role": "assistant", "content": _PLACEHOLDER}  # stands for an answer of the model
_THOUGHT = "<think>\nhm\n</think>\n\n"


@dataclass(frozen=True)
class Exchange:
    """The environment's messages after one of the model's turns. An empty role means the template's role for tools."""

    messages: tuple[Message, ...]
    turn: Message = field(default_factory=lambda: TURN)  # the model's, as it is rendered: with the calls it is about

    def without_calls(self) -> Exchange:
        if not self.turn.get("tool_calls"):
            return self
        return Exchange(tuple({"role": "", "content": message["content"]} for message in self.messages))


class NextTurn:
    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.tools = ToolChat(chat)
        self._end = chat.end_of_turn
        self._end_ids = chat.encode_prompts([self._end])[0] if self._end else []
        self.role = self._find_role()
        # Raises if the template cannot render a conversation.
        asked: Message = {"role": "user", "content": "?"}
        after = self._after_turn(chat.render(self._with_turns([asked], [Exchange(({"role": "", "content": "?"},))])))
        self._ends = [self._end, self._inner_end(after), (self.tools.after_call or ("", ""))[1]]
        self.caution = self._find_caution()

    def ids(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], sampled: Sequence[int]) -> Ids:
        """The tokens to append to `sampled`, the model's last turn. `exchanges` are all so far, the new one last."""
        if any(one.turn.get("tool_calls") for one in exchanges):
            with suppress(DataError):  # the template does not write these calls: their results are plain turns
                rendered = self.tools.render(self._with_turns(prompt, exchanges))
                return self.ids_after(rendered, self.stand_in(exchanges[-1].turn), sampled)
            exchanges = [one.without_calls() for one in exchanges]
        return self.ids_after(self._chat.render(self._with_turns(prompt, exchanges)), TURN, sampled)

    def read(self, prompt: Sequence[int], sampled: Sequence[int], tools: Tools, *, reads_calls: bool = True) -> Answer:
        """The model's answer as text, reasoning and calls."""
        form, tokenizer = self.tools.answers, self._chat.tokenizer
        end = str(tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False))
        return form.parse(answer_text(tokenizer, sampled, form), tools, prompt=end, reads_calls=reads_calls)

    def exchange(self, calls: Sequence[AnyCall], results: Sequence[Message]) -> Exchange:
        """`results` as those of the calls, if they are and the template writes calls."""
        known = [call.in_message(call_id("", place)) for place, call in enumerate(calls) if isinstance(call, ToolCall)]
        if not len(known) == len(calls) == len(results) or any(one["role"] for one in results):
            return Exchange(tuple(results))
        answers = [
            {**one, "role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
            for one, call in zip(results, known, strict=True)
        ]
        turn: Message = {**TURN, "tool_calls": known}
        return Exchange(tuple(results)) if self.stand_in(turn) is TURN else Exchange(tuple(answers), turn)

    def stand_in(self, answer: JsonMapping) -> Message:
        """For an answer in a conversation to render: with calls, as templates ask for them before a tool's turn."""
        calls = answer.get("tool_calls")
        if not calls or self.tools.after_call is None:
            return TURN
        hidden = {"arguments": {_PLACEHOLDER: _PLACEHOLDER}}
        return {
            **TURN,
            "content": "",
            "tool_calls": [{**one, "function": {**one["function"], **hidden}} for one in calls],
        }

    def ids_after(self, rendered: str, turn: Message, sampled: Sequence[int], *, is_cut: bool = False) -> Ids:
        """The tokens to append to `sampled`, which stands in a rendered conversation where its last `turn` does.

        A token that has ended the answer stands for the end that the template writes; an answer without one (`is_cut`,
        or ended by a stop string) gets that.
        """
        body = self._after_turn(rendered)
        rest, _ = (self.tools.after_call or ("", "")) if turn.get("tool_calls") else ("", "")
        if not body.startswith(rest):
            raise DataError("the chat template writes this call in another way than others")
        body = body[len(rest) :]
        if not (closed := self._closed_by(sampled, is_cut=is_cut)):
            return self._chat.encode_prompts([body])[0]
        text = body.lstrip()
        written = next((end for end in (closed, *self._ends) if end and text.startswith(end.lstrip())), "")
        if written:
            body = text[len(written.lstrip()) :]
        # Some tokenizers encode the start of a text differently.
        before, whole, alone = self._chat.encode_prompts([closed, closed + body, body])
        return whole[len(before) :] if whole[: len(before)] == before else alone

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the engine decodes completions."""
        return self._chat.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _with_turns(self, prompt: Sequence[Message], exchanges: Sequence[Exchange]) -> list[Message]:
        messages = list(prompt)
        for exchange in exchanges:
            said = ({**message, "role": message["role"] or self.role} for message in exchange.messages)
            messages += [self.stand_in(exchange.turn), *said]
        return messages

    def _after_turn(self, rendered: str) -> str:
        """The template's output after the model's last turn, including the opening of the next turn."""
        _, found, after = rendered.rpartition(_PLACEHOLDER)
        if not found:
            raise DataError(
                "the chat template leaves out earlier turns of the assistant, so no conversation of several turns can "
                "be written with it; use another one (policy.tokenizer.chat_template)"
            )
        return after

    def _closed_by(self, sampled: Sequence[int], *, is_cut: bool) -> str:
        """The end that the model has given its turn; empty if a stop string or the length limit ended it."""
        if self._end_ids and list(sampled[-len(self._end_ids) :]) == self._end_ids:
            return self._end
        if is_cut or not sampled or sampled[-1] not in self.tools.end_token_ids:
            return ""
        return str(self._chat.tokenizer.decode([sampled[-1]], skip_special_tokens=False))

    def _inner_end(self, after: str) -> str:
        """The token with which the template ends a turn that others follow: then a second special token does."""
        special = self._chat.special_texts
        end = max((one for one in special if after.lstrip().startswith(one)), key=len, default="")
        follows = after.lstrip()[len(end) :].lstrip()
        return end if end and self._chat.closes_answers and follows.startswith(tuple(special)) else ""

    def _find_role(self) -> str:
        """`tool` if the template supports it, else `user`."""
        asked: Message = {"role": "user", "content": "?"}
        for role in ("tool", "user"):
            try:
                written = self._chat.render([asked, TURN, {"role": role, "content": "0bserved"}])
            except DataError:
                continue
            if "0bserved" in written.rpartition(_PLACEHOLDER)[2]:
                return role
        raise DataError(
            "the chat template can write neither a tool's turn nor a user's after an assistant's, so no conversation "
            "of several turns can be written with it; use another one (policy.tokenizer.chat_template)"
        )

    def _find_caution(self) -> str | None:
        """How the template changes earlier turns; None if it does not."""
        asked: Message = {"role": "user", "content": "?"}
        before = self._chat.render([asked])
        for opening, what in (("", "writes an answer"), (_THOUGHT, "writes an answer with a chain of thought")):
            text = opening + _PLACEHOLDER
            turn: Message = {"role": "assistant", "content": text}
            after: Message = {"role": self.role, "content": "?"}
            if not self._chat.render([asked, turn, after]).startswith(before + text):
                return (
                    f"the chat template {what} differently once the conversation continues; posttrain keeps the "
                    "tokens that were sampled, so a server that renders the whole conversation again shows the model "
                    "another text"
                )
        return None


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
        text, ids = writer.chat.prompt(attached(messages, task.images))
        return replace(task, prompt=text, prompt_ids=tuple(ids), messages=tuple(messages))


class ToolWriter:
    """Adds the tools of one environment to a prompt: `chat` renders the conversation that `messages` returns."""

    def __init__(self, chat: ChatFormat, tools: Tools) -> None:
        self.chat, self._described = chat, ""
        if writes_tools(chat, tools):
            self.chat = ChatFormat(chat.tokenizer, chat.template, {**chat.kwargs, "tools": [*map(dict, tools)]})
            self.chat.image_tokens = chat.image_tokens
        else:
            self._described = describe(tools, ToolChat(chat).answers)

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        return with_description(messages, self._described, self.chat) if self._described else list(messages)
