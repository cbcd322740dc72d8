"""The interface of multi-turn environments.

    reset(task)            -> state        once per task; all samples of the task start from this state
    step(state, response)  -> Turn         after each turn of the model
    end(state, reason)     -> reward       when the limit of turns or tokens ends what `step` would continue

The state is a value: it is pickled after each call and may come back in another process. So it must contain everything
that the next turn needs, and turns must not change the instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.data.tool_calls import AnyCall
from posttrain.files.json_files import JsonMapping

# A text gets the role `tool` if the chat template has it, else `user`; a {role, content} message has its own.
Observation = str | Mapping[str, str]
Reward = float | Mapping[str, float]  # a number, or named parts that add up
EndReason = Literal["turns", "tokens"]
MAX_OBSERVATION_CHARACTERS = 100_000  # of all that the model reads after one turn


class Response(str):
    """A turn of the model: its text, and the tool calls in it as the model's chat template writes them."""

    calls: Sequence[AnyCall] = ()


@dataclass(frozen=True)
class TurnTask:
    """What a conversation is about."""

    prompt: str  # as the model sees it, chat template applied
    messages: Sequence[JsonMapping]  # before the chat template
    reference: Any  # the expected answer, as the dataset gives it
    metadata: JsonMapping = field(default_factory=dict)  # the row's other columns


@dataclass(frozen=True)
class Turn:
    """The environment's turn. Rewards of all turns of a conversation are added up."""

    state: Any = None
    observation: Observation | Sequence[Observation] | None = None  # what the model reads next
    reward: Reward | None = None  # None: this turn gives none
    done: bool = False
    answer: str | None = None  # with `done`: a final answer for the judge that the same block under `env:` names
    counts: Mapping[str, float] = field(default_factory=dict)  # added up over the turns and reported as metrics


class TurnEnvironment(ABC):
    """A base with the usual answers. Any class with `reset` and `step` will do; `tools` and `end` may be left out."""

    call_limit_s: float = 10.0  # `env.<name>.timeout_s`: a call that takes longer is given up and its process killed
    tools: Sequence[JsonMapping] = ()  # JSON schemas, OpenAI's format: put into the prompt, see docs/multi-turn.md

    def reset(self, task: TurnTask) -> Any:
        return task

    @abstractmethod
    def step(self, state: Any, response: str) -> Turn: ...

    def end(self, state: Any, reason: EndReason) -> Reward:
        """A conversation without an end has reward 0, unless the environment overrides this."""
        return 0.0


Request = Literal["describe", "reset", "step", "end"]


@dataclass(frozen=True)
class TurnItem:
    """One call. The state stays pickled: only workers know the classes in it."""

    request: Request
    noise_key: str = ""  # seeds `random` for this call
    task: TurnTask | None = None  # of reset
    state: bytes = b""  # of step and end
    response: str = ""  # of step
    calls: tuple[AnyCall, ...] | None = None  # of tools, in the response; None: nobody has read them
    reason: EndReason = "turns"  # of end
    conversation: str = ""  # of step and end: the same in all turns of a conversation, and in no other
