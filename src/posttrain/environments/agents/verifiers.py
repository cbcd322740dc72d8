"""Environments of verifiers: `env.<name>.agent: verifiers`, `agent_kwargs: {taskset: my-taskset}`.

verifiers runs an episode in a process whose Python `env.<name>.python` names, and asks the model by the endpoint of the
rollout. Rewards and metrics are its own; an episode that is not `ok` is unscored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.environments.item import Unscored
from posttrain.environments.side_process import SideProcess
from posttrain.environments.turns.interface import TurnTask
from posttrain.files.json_files import JsonObject

_NO_LIMIT_S = 1e7  # the driver's limits leave out the time that an agent waits for the model


class Verifiers:
    def __init__(
        self,
        taskset: str,
        taskset_config: Mapping[str, Any] | None = None,
        harness: str = "posttrain-chat",
        harness_config: Mapping[str, Any] | None = None,
        runtime: str = "subprocess",
        python: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        setup = {"taskset": taskset, "taskset_config": dict(taskset_config or {}), "runtime": runtime}
        setup |= {"harness": harness, "harness_config": dict(harness_config or {})}
        self.side = SideProcess(python, "posttrain_verifiers.py", setup, _NO_LIMIT_S, env or {})

    def __call__(self, task: TurnTask, endpoint: Any) -> object:
        if "index" not in task.metadata or "task" not in task.metadata:
            raise Unscored("the row names no task of the taskset: write rows with `posttrain agents tasks`")
        which = {"index": task.metadata["index"], "task": task.metadata["task"]}
        address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        return self.side.ask("run", **which, **address)

    def tasks(self, split: str, count: int | None) -> list[JsonObject]:
        rows: list[JsonObject] = self.side.ask("tasks", count=count)
        return rows
