"""Conversations as a reward model reads them: whole, exactly as the chat template writes them.

A language model is trained up to the end of its turn, because sampling stops there. A reward model reads finished
conversations, and its users (`transformers`, TRL, vLLM) pass it `apply_chat_template` of all messages, which
often prints something after the last turn. The score is read at the last token, so this suffix must be present.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from posttrain.data.chat import ChatFormat, EncodedTurn
from posttrain.data.errors import DataError
from posttrain.files.digests import sha256_of
from posttrain.types import Message


class WholeChatFormat(ChatFormat):
    """A `ChatFormat` whose turns, prompt and response together, are the tokens of the finished conversation.

    The end of the prompt has no meaning here: it is the prefix shared by answers to the same prompt, computed once.
    """

    @property
    def last_token_ids(self) -> tuple[int, ...]:
        _, response = self.turn([{"role": "user", "content": "?"}], "!")
        return tuple(dict.fromkeys([*self.stop_token_ids, response[-1]]))

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        parent = super().fingerprints
        return {**parent, "template": sha256_of(f"whole {parent['template']}")}

    def render_turn(self, prompt_messages: Sequence[Message], response: str) -> tuple[str, str]:
        if self.template is None:
            return super().render_turn(prompt_messages, response)
        whole = self._written([*prompt_messages, {"role": "assistant", "content": response}])
        opened = self.render(prompt_messages)
        if not whole.startswith(opened):  # a template that writes a finished turn in another way than an open one
            finished = self._written([*prompt_messages, {"role": "assistant", "content": "x"}])
            opened = opened[: shared_length(opened, finished)]
        if not opened or not whole.startswith(opened) or whole == opened:
            raise DataError("the chat template writes nothing that the answers to one prompt share")
        return opened, whole[len(opened) :]

    def split_turns(self, turns: Sequence[tuple[str, str]]) -> list[EncodedTurn]:
        """Tokens of the whole text, cut after the last token that all answers to one prompt share with the prompt."""
        wholes = self.encode_prompts([before + answer for before, answer in turns])
        distinct = list(dict.fromkeys(before for before, _ in turns))
        shared = dict(zip(distinct, self.encode_prompts(distinct), strict=True))
        for (before, _), whole in zip(turns, wholes, strict=True):
            length = max(0, min(shared_length(shared[before], whole), len(whole) - 1))
            shared[before] = shared[before][:length]
        return [
            EncodedTurn(shared[before], whole[len(shared[before]) :], crossed=False)
            for (before, _), whole in zip(turns, wholes, strict=True)
        ]

    def _written(self, messages: Sequence[Message]) -> str:
        return self._write(messages, opens_answer=False)


def shared_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many items, or characters, both start with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
