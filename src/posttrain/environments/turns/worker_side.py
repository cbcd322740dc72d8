"""The worker's side: makes the environment of a block's `turns`, and answers the calls that the driver sends.

An answer is a small JSON object, so everything a user's class returns is checked here, where the message can name it.
"""

from __future__ import annotations

import base64
import inspect
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.environments.item import BadSetup, PlainReply, Unscored, encodable, to_reward
from posttrain.environments.python_function import awaiting_caller, load_module, seed_noise
from posttrain.environments.turns.interface import MAX_OBSERVATION_CHARACTERS, Response, Turn, TurnEnvironment, TurnItem
from posttrain.files.json_files import JsonMapping, JsonObject

# A reply may have a megabyte, and base64 makes four bytes of three.
_MAX_STATE_BYTES = 500_000


def turn_taker(setup: JsonMapping) -> Callable[[TurnItem], PlainReply]:
    environment = _build(setup["turns"], setup["kwargs"], Path(setup["base_folder"]), setup["timeout_s"])
    call = awaiting_caller()

    def answer(item: TurnItem) -> PlainReply:
        seed_noise(item.noise_key)
        if item.request == "describe":
            return PlainReply({"tools": _tools(environment)})
        if item.request == "reset":
            return PlainReply({"state": _packed(call(environment.reset, item.task), "reset")})
        state = pickle.loads(item.state)
        if item.request == "end":
            ended = call(environment.end, state, item.reason) if hasattr(environment, "end") else 0.0
            return PlainReply(_reward_fields(ended))
        response = item.response
        if item.calls is not None:
            response = Response(response)
            response.calls = item.calls
        return PlainReply(_turn_fields(call(environment.step, state, response)))

    return answer


def _build(spec: str, kwargs: JsonMapping, base_folder: Path, limit_s: float) -> Any:
    module, module_name, attribute = load_module(spec, base_folder)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type) and _takes_turns(value)]
        known = f"the classes it has: {', '.join(sorted(classes))}" if classes else "it has none with reset and step"
        raise BadSetup(f"{module_name} has no class {attribute!r}; {known}")
    if not _takes_turns(found):
        raise BadSetup(f"{module_name}:{attribute} needs the methods reset(task) and step(state, response)")
    if issubclass(found, TurnEnvironment):
        found.call_limit_s = limit_s
    try:
        inspect.signature(found).bind(**kwargs)  # its error is clearer than that of the call
        return found(**kwargs)
    except (TypeError, ValueError) as error:
        raise BadSetup(f"{attribute} cannot be made with turns_kwargs {dict(kwargs)}: {error}") from error


def _takes_turns(found: type) -> bool:
    return callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))


def _tools(environment: object) -> list[Any]:
    tools = getattr(environment, "tools", ()) or ()
    named = [isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools]
    if not all(named) or not all("name" in tool["function"] for tool in tools):
        raise Unscored('tools must be JSON schemas: {"type": "function", "function": {"name": ..., "parameters": ...}}')
    plain: list[Any] = json.loads(json.dumps(list(tools)))
    return plain


def _turn_fields(turn: object) -> JsonObject:
    if not isinstance(turn, Turn):
        raise Unscored(f"step returned {type(turn).__name__}: a posttrain.environments.turns.Turn is needed")
    if turn.observation is None and not turn.done:
        raise Unscored("step returned a Turn with neither an observation nor done: the conversation cannot continue")
    if turn.answer is not None and not isinstance(turn.answer, str):
        raise Unscored(f"the answer of a Turn is {type(turn.answer).__name__}: text is needed")
    fields: JsonObject = {"done": bool(turn.done), "counts": _counts(turn.counts)}
    if turn.reward is not None:
        fields |= _reward_fields(turn.reward)
    if turn.done:
        return fields if turn.answer is None else {**fields, "answer": encodable(turn.answer)}
    return {**fields, "state": _packed(turn.state, "step"), "observation": _messages(turn.observation)}


def _reward_fields(value: object) -> JsonObject:
    reward, parts = to_reward(value)
    return {"reward": reward, "parts": {encodable(name)[:100]: part for name, part in parts.items()}}


def _counts(counts: object) -> dict[str, float]:
    if not isinstance(counts, Mapping):
        raise Unscored(f"the counts of a Turn are {type(counts).__name__}: a dict of numbers is needed")
    # A count is a number like a reward: the same values are accepted.
    return {encodable(str(name))[:100]: to_reward({"count": value})[0] for name, value in counts.items()}


def _messages(observation: Any) -> list[dict[str, str]]:
    """Observations as messages; an empty role is left to the chat template."""
    several = isinstance(observation, Sequence) and not isinstance(observation, str)
    messages = []
    for one in observation if several else [observation]:
        message = {"role": "", "content": one} if isinstance(one, str) else one
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise Unscored(
                f"an observation is {one!r:.80}: text, or a message with the texts role and content, is needed"
            )
        if message["role"] == "assistant":
            raise Unscored("an observation has the role assistant, which is the model's")
        messages.append({"role": message["role"], "content": encodable(message["content"])})
    if not messages:
        raise Unscored("step returned a Turn with no observation in its list")
    length = sum(len(message["content"]) for message in messages)
    if length > MAX_OBSERVATION_CHARACTERS:
        raise Unscored(f"an observation has {length} characters: at most {MAX_OBSERVATION_CHARACTERS} are passed on")
    return messages


def _packed(state: object, method: str) -> str:
    try:
        data = pickle.dumps(state)
    except Exception as error:
        raise Unscored(
            f"the state that {method} returned cannot be pickled: {type(error).__name__}: {error}"
        ) from error
    if len(data) > _MAX_STATE_BYTES:
        raise Unscored(f"the state that {method} returned has {len(data)} bytes: at most {_MAX_STATE_BYTES} may travel")
    return base64.b64encode(data).decode()
