"""The requests of one agent's rollout as sequences of tokens. No HTTP and no model.

An agent sends its whole history with every request. A history that continues an earlier one of the same rollout keeps
its tokens: the prompt is the earlier prompt, the tokens that were sampled then, and what the chat template writes for
the new messages. What was sampled is never rendered or tokenised again. Any other history (rewritten, compacted, of a
sub-agent) continues the longest one that it begins with, or is rendered from its first message on.

So the answered requests form trees, and each path from a root to a leaf is a branch to train on. An answer that lies on
several branches is trained in the first; in the others it is context, like everything that the rollout did not sample.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import Answer, Tools
from posttrain.data.tool_prompts import parsed_arguments
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping
from posttrain.rollouts.turn_prompts import NextTurn
from posttrain.types import Completion, Sampling, Utterance

Messages = Sequence[JsonMapping]
CallKey = tuple[str, int]  # digest of the prompt, and how many requests of the rollout had it before
_UNANSWERED = Completion((), (), "", "stop")


@dataclass(eq=False)
class Call:
    """A request, and its answer as soon as it has one."""

    parent: Call | None  # the call whose history it continues
    context_ids: tuple[int, ...]  # between the parent's answer and this one; the whole prompt without a parent
    said: Utterance  # the same as text
    key: CallKey
    sampling: Sampling
    answer: Completion = _UNANSWERED
    history: tuple[str, ...] = ()  # tools and messages, for comparison

    @property
    def path(self) -> list[Call]:
        """From its root to this call."""
        calls = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and the answer."""
        return tuple(token for call in self.path for ids in (call.context_ids, call.answer.token_ids) for token in ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.token_ids[: len(self.token_ids) - len(self.answer.token_ids)]


class PromptWriter:
    """Messages to tokens, and tokens to messages, for all rollouts. Threads may share it."""

    def __init__(self, chat: ChatFormat) -> None:
        self.next_turn = NextTurn(chat)
        self.chat = self.next_turn.tools
        self._lock = threading.Lock()  # tokenizers are not made for several threads

    def first(self, messages: Messages, tools: Tools) -> tuple[int, ...]:
        with self._lock:
            return tuple(self.chat.chat.encode_prompts([self.chat.render(messages, tools)])[0])

    def following(self, messages: Messages, place: int, tools: Tools, answer: Completion) -> tuple[int, ...]:
        """What the messages from `place` on add to the one before, whose tokens are those of `answer`."""
        with self._lock:
            turn = self.next_turn.stand_in(messages[place - 1])
            rendered = self.chat.render([*messages[: place - 1], turn, *messages[place:]], tools)
            is_cut = answer.finish_reason == "length"
            return tuple(self.next_turn.ids_after(rendered, turn, answer.token_ids, is_cut=is_cut))

    def read(self, prompt: Sequence[int], answer: Completion, tools: Tools) -> Answer:
        """The model's answer as text, reasoning and calls."""
        with self._lock:
            return self.next_turn.read(prompt, answer.token_ids, tools, reads_calls=bool(tools))


@dataclass(eq=False)
class CallTree:
    """The answered requests of one rollout."""

    writer: PromptWriter
    calls: list[Call] = field(default_factory=list)  # as they were answered
    _heads: dict[tuple[str, ...], Call] = field(default_factory=dict)  # by tools and all messages, the answer included

    def call(self, messages: Messages, tools: Tools, sampling: Sampling) -> Call:
        """The tokens of a request. DataError if the chat template cannot write it."""
        history = (json.dumps(tools, sort_keys=True), *map(_compared, messages))
        length = next((n for n in range(len(history), 1, -1) if history[:n] in self._heads), 0)
        parent: Call | None = None
        if length:
            with suppress(DataError):  # the template does not write it after a stand-in: it is a new root
                known = self._heads[history[:length]]
                context = self.writer.following(messages, length - 1, tools, known.answer)
                parent, new = known, messages[length - 1 :]
        if parent is None:
            context, new = self.writer.first(messages, tools), messages
        said = Utterance(str(new[0]["role"]) if new else "", "\n".join(map(_text, new)), len(context))
        call = Call(parent, context, said, ("", 0), sampling, history=history)
        call.key = (sha256_of(array("q", call.token_ids).tobytes()), 0)
        return call

    def add(self, call: Call, answer: Completion, message: JsonMapping) -> None:
        """`message`: the answer as the agent gets it."""
        call.answer = answer
        self.calls.append(call)
        history = (*call.history, _compared(message))
        self._heads[history] = min(call, self._heads.get(history, call), key=lambda known: known.key)

    def branches(self) -> list[Completion]:
        """What to train on, in an order that does not depend on that of the requests: the longest first."""
        parents = {id(call.parent) for call in self.calls}
        paths = [call.path for call in self.calls if id(call) not in parents]
        paths.sort(key=lambda path: (-len(path[-1].token_ids), path[-1].token_ids, path[-1].key))
        seen: Counter[int] = Counter()
        return [_branch(path, seen) for path in paths]


def _branch(path: Sequence[Call], seen: Counter[int]) -> Completion:
    root = path[0]
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for call in path:
        context = call.context_ids if call is not root else ()
        ids += (*context, *call.answer.token_ids)
        logprobs += (*(0.0 for _ in context), *call.answer.logprobs)
        mask += (*(False for _ in context), *(not seen[id(call)] for _ in call.answer.token_ids))
        seen[id(call)] += 1
    last = path[-1].answer
    return Completion(
        tuple(ids),
        tuple(logprobs),
        last.text,
        last.finish_reason,
        mask=() if all(mask) else tuple(mask),
        prompt_ids=root.context_ids,
    )


def _compared(message: JsonMapping) -> str:
    """A message without what agents leave out or change: ids of calls, reasoning, null fields, the form of arguments,
    white space around an answer."""
    kept: dict[str, object] = {"role": message["role"], "text": _text(message)}
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        kept["text"] = _text(message).strip()
        kept["calls"] = [(function["name"], parsed_arguments(function["arguments"])) for function in functions]
    return json.dumps(kept, sort_keys=True)


def _text(message: JsonMapping) -> str:
    return str(message.get("content") or "")
