"""Runs episodes of verifiers, one at a time, against the endpoint of a rollout. Runs where verifiers is installed."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from posttrain_side import Problem, require, serve

TASKS_AT_ONCE = 100_000  # of a taskset without an end


def start(setup: Any) -> tuple[Any, VerifiersSide]:
    version = require("verifiers", "0.4", "0.5")
    path = Path(setup["taskset"]).expanduser()
    if path.suffix == ".py":
        if not path.is_file():
            raise Problem(f"there is no file {path}")
        sys.path.insert(0, str(path.resolve().parent))
        setup = {**setup, "taskset": path.stem}
    return {"version": version}, VerifiersSide(setup)


class VerifiersSide:
    def __init__(self, setup: Any) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = {"harness": {"id": setup["harness"], **setup["harness_config"]}, "runtime": {"type": setup["runtime"]}}
        taskset = {"id": setup["taskset"], **setup["taskset_config"]}
        try:
            self.env = load_environment(resolve_env_config({"taskset": taskset, "agent": agent}))
            endless = itertools.islice(self.env.taskset, TASKS_AT_ONCE)
            self.all = list(endless)
        except Exception as error:
            raise Problem(
                f"the taskset {setup['taskset']!r} cannot be used: {type(error).__name__}: {error}"
            ) from error
        self.count = itertools.count()

    def tasks(self, count: int | None) -> Any:
        chosen = self.all[: count or len(self.all)]
        return [
            {"input": task.data.prompt_text, "index": index, "task": task.hash} for index, task in enumerate(chosen)
        ]

    def run(self, index: int, task: str, base_url: str, api_key: str, model: str) -> Any:
        if not 0 <= index < len(self.all) or self.all[index].hash != task:
            raise Problem(
                f"the taskset has no such task at index {index}: write the rows again (posttrain agents tasks)"
            )
        return asyncio.run(self.episode(self.all[index], base_url, api_key, model))

    async def episode(self, task: object, base_url: str, api_key: str, model: str) -> Any:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        variable = f"POSTTRAIN_ROLLOUT_KEY_{next(self.count)}"  # clients are cached by their settings
        os.environ[variable] = api_key
        try:
            async with self.env.serving():
                context = ModelContext(model, EvalClientConfig(base_url=base_url, api_key_var=variable))
                episode = await self.env.run_episode(task, context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise Problem(f"the episode failed: {errors[-1] if errors else 'no reason is given'}"[:500])
        if len(episode.traces) != 1:
            raise Problem(f"the episode has {len(episode.traces)} traces: environments of one agent are supported")
        (trace,) = episode.traces
        if not trace.rewards or None in trace.rewards.values():
            raise Problem(f"the episode has no reward: {trace.rewards}")
        parts = {name: reward.value for name, reward in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **parts, "reward": sum(parts.values())}


if __name__ == "__main__":
    serve(start)
