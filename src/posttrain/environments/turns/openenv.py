"""Environments of OpenEnv: `env.<name>.turns: openenv`, a server's `base_url` or a local `package`.

A turn of the model is an action, the observation is what it reads next, and the rewards of the steps add up. OpenEnv's
own client, and the server of a local package, run in a process whose Python `env.<name>.python` names. Each rollout has
an instance of its own, which begins with the seed of its task.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.environments.item import Unscored
from posttrain.environments.side_process import SideError, SideProcess
from posttrain.environments.turns.interface import EndReason, Turn, TurnEnvironment, TurnTask
from posttrain.environments.turns.replay import History, LiveStates, NoRoom
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json

_OF_OPENENV = ("done", "reward", "metadata")
_CONVERTED: Mapping[str, type] = {"integer": int, "number": float}


class OpenEnv(TurnEnvironment):
    """`field` of the action gets the model's text, unless `as_json`: then the text is the action. `observation` is the
    field that the model reads, null is all of them; `metrics` are numbers of an observation, added up over the turns;
    `reset` holds further arguments of `reset`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        package: str | None = None,
        app: str = "server.app:app",
        field: str | None = None,
        as_json: bool = False,
        observation: str | None = None,
        metrics: Sequence[str] = (),
        reset: Mapping[str, Any] | None = None,
        max_open: int = 32,
        python: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        if (base_url is None) == (package is None):
            raise ValueError("either base_url (of a server) or package (a folder, or the name of a module) is needed")
        if base_url is not None and not str(base_url).startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}: http://… is needed")
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}: at least 1 is needed")
        limit_s = 0.6 * self.call_limit_s
        setup = {"base_url": base_url and base_url.rstrip("/"), "package": package, "app": app, "limit_s": limit_s}
        self.side = SideProcess(python, "posttrain_openenv.py", setup, 0.8 * self.call_limit_s, env or {})
        self._actions = _fields(self.side.about["schema"], "action")
        self._field = None if as_json else _chosen(field, self._actions)
        seen = _fields(self.side.about["schema"], "observation")
        for name in [*([observation] if observation is not None else []), *metrics]:
            if name not in seen:
                raise ValueError(f"an observation has no {name!r}; it has {', '.join(seen)}")
        self._observation, self._metrics, self._reset = observation, tuple(metrics), dict(reset or {})
        self._numbers = itertools.count()
        self._states = LiveStates(lambda start: _Instance(self, start), max_open)

    def reset(self, task: TurnTask) -> History:
        row, first = task.metadata, task.metadata.get("first_observation")
        own = {name: row[name] for name in ("seed", "split", "index") if first is not None and name in row}
        return History({"arguments": {"seed": random.getrandbits(31), **self._reset, **own}, "first": first})

    def step(self, state: History, response: str) -> Turn:
        try:
            action = self._action(response)
        except ValueError as error:
            return Turn(state, f"error: {error}", counts={"malformed_actions": 1, **dict.fromkeys(self._metrics, 0)})
        result = self._states.act(state, action)
        if result["done"]:
            self._states.release(state)
        counts = {"malformed_actions": int(result["is_refused"]), **result["metrics"]}
        return Turn(state, result["text"], result["reward"], result["done"], counts=counts)

    def end(self, state: History, reason: EndReason) -> float:
        self._states.release(state)
        return 0.0

    def _action(self, response: str) -> JsonObject:
        if self._field is not None:
            convert = _CONVERTED.get(self._actions[self._field].get("type", ""), str)
            value = convert(response.strip()) if convert is not str else response
            if value in (math.inf, -math.inf) or value != value:
                raise ValueError(f"{value} is no number that can be sent")
            return {self._field: value}
        action = parse_json(response)
        if not isinstance(action, dict):
            raise ValueError(f"a JSON object with {', '.join(self._actions)} is needed")
        return action

    def read(self, result: JsonMapping) -> JsonObject:
        """A result without what differs between two instances, such as their ids."""
        seen = result["observation"]
        shown = {name: value for name, value in seen.items() if name not in _OF_OPENENV}
        text = seen.get(self._observation, "") if self._observation is not None else shown
        return {
            "text": text if isinstance(text, str) else json.dumps(text),
            "reward": None if result["reward"] is None else float(result["reward"]),
            "done": result["done"],
            "metrics": {name: float(seen.get(name) or 0) for name in self._metrics},
            "is_refused": False,
        }

    def next_session(self) -> str:
        return str(next(self._numbers))

    def tasks(self, split: str, count: int | None) -> list[JsonObject]:
        """Rows of data: the environment's own tasks, or instances of the seeds 0 … `count` - 1, with what the model
        reads first.
        """
        own = self.side.ask("tasks", split=split, count=count)
        starts = [{"split": split, "index": index} for index in range(len(own))] if own is not None else []
        rows = []
        for start in starts or [{"seed": seed} for seed in range(count or 100)]:
            instance = _Instance(self, {"arguments": {**self._reset, "seed": 0, **start}, "first": None})
            instance.close()
            rows.append({"input": instance.first, **start, "first_observation": instance.first})
        return rows


class _Instance:
    """An environment in the other process. All of them are lost when that process ends."""

    def __init__(self, owner: OpenEnv, start: JsonMapping) -> None:
        self._owner, self._session, self._life = owner, owner.next_session(), 0
        try:
            begun = owner.side.ask("reset", session=self._session, arguments=start["arguments"])
        except SideError as error:
            if error.kind == "capacity":
                raise NoRoom(f"the OpenEnv server has no free session (its max_concurrent_envs): {error}") from error
            raise
        self._life = owner.side.starts
        self.first = owner.read(begun)["text"]
        if start["first"] not in (None, self.first):
            self.close()
            raise Unscored(
                f"the environment does not repeat itself: with {dict(start['arguments'])} it begins with "
                f"{self.first[:80]!r} and not with {start['first'][:80]!r}"
            )

    def act(self, action: JsonMapping) -> JsonObject:
        try:
            return self._owner.read(self._owner.side.ask("step", session=self._session, action=action))
        except SideError as error:
            if error.kind != "action":
                raise
            return {"text": f"error: {error}", "reward": None, "done": False, "metrics": {}, "is_refused": True}

    def close(self) -> None:
        if self.is_open:
            self._owner.side.ask("close", session=self._session)

    @property
    def is_open(self) -> bool:
        return self._life == self._owner.side.starts and self._owner.side.pid > 0


def _fields(schema: JsonMapping, part: str) -> dict[str, JsonMapping]:
    properties = schema.get(part, {}).get("properties", {})
    return {name: about for name, about in properties.items() if name not in _OF_OPENENV}


def _chosen(field: str | None, actions: Mapping[str, JsonMapping]) -> str:
    if field in actions:
        return str(field)
    if field is None and len(actions) == 1:
        return next(iter(actions))
    given = "field is not set" if field is None else f"an action has no field {field!r}"
    raise ValueError(f"{given}: one of {', '.join(actions)} is needed, or as_json: true")
