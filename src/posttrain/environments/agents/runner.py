"""Runs an agent in a worker process: a Python function of a task and an endpoint, or a command line.

A function `solve(task, endpoint)` may be `async def`. A command gets the task as JSON on its standard input and the
endpoint as OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and prints its result as JSON in its last line. A result
is a number or named numbers (the reward), or a text (an answer for the judge of the block).

What an agent leaves running is killed when it has returned. The driver limits its time. Does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from posttrain.environments.agents.verifiers import Verifiers
from posttrain.environments.item import BadSetup, PlainReply, Unscored, encodable, to_reward
from posttrain.environments.python_function import awaiting_caller, load_function, seed_noise
from posttrain.environments.turns.interface import TurnTask
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.processes import ending_of

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ANSWER_CHARACTERS = 500_000
_MAX_LINE_BYTES = 8 << 20  # an answer of so many characters, each written as two escapes
_KILL_GRACE_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Where an agent reaches the model that is being trained. The key is that of one rollout."""

    base_url: str
    api_key: str = field(repr=False)
    model: str

    @property
    def variables(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


@dataclass(frozen=True)
class AgentItem:
    """One rollout for a worker."""

    task: TurnTask
    endpoint: Endpoint
    noise_key: str  # seeds `random`


def agent_runner(setup: JsonMapping) -> Callable[[AgentItem], PlainReply]:
    agent, folder = setup["agent"], Path(setup["base_folder"])
    run: Callable[[TurnTask, Endpoint], object]
    if agent == "verifiers":
        kwargs = setup["kwargs"]
        try:
            inspect.signature(Verifiers).bind(**kwargs, env=setup["env"])
        except TypeError as error:
            named = ", ".join(kwargs) or "{}"
            raise BadSetup(f"verifiers cannot be used with agent_kwargs {named}: {error}") from error
        run = Verifiers(**kwargs, env=setup["env"])
    elif isinstance(agent, str):
        run = _function(agent, setup["kwargs"], folder)
    else:
        run = _command(agent, folder)
    if sys.platform == "linux":  # what a dead child of the agent has started becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def answer(item: AgentItem) -> PlainReply:
        seed_noise(item.noise_key)
        os.environ |= item.endpoint.variables
        try:
            return PlainReply(_result(run(item.task, item.endpoint)))
        finally:
            _kill_children(run.side.pid if isinstance(run, Verifiers) else -1)

    return answer


def code_files(agent: str | Sequence[str], folder: Path) -> list[Path]:
    """The code of an agent, as far as its setting names it: files and modules, and the modules beside them."""
    named = [agent.rpartition(":")[0] or agent.rpartition(".")[0]] if isinstance(agent, str) else agent
    found: set[Path] = set()
    for word in named:
        module = word.replace(".", "/")
        folders = [str(folder), *sys.path]
        places = (Path(place, f"{module}{end}") for place in folders for end in (".py", "/__init__.py"))
        for path in (folder / os.path.expanduser(word), *places):
            if os.path.isfile(path):
                found |= {path, *path.parent.glob("*.py")}
                break
    return sorted(path for path in found if os.path.isfile(path) and os.access(path, os.R_OK))


def _function(spec: str, kwargs: JsonMapping, folder: Path) -> Callable[[TurnTask, Endpoint], object]:
    function = load_function(spec, folder)
    with contextlib.suppress(ValueError):  # no signature is known
        try:
            inspect.signature(function).bind(None, None, **kwargs)
        except TypeError as error:
            given = f" and agent_kwargs {', '.join(kwargs)}" if kwargs else ""
            raise BadSetup(f"{spec} cannot be called with a task, an endpoint{given}: {error}") from error
    call = awaiting_caller()
    return lambda task, endpoint: call(function, task, endpoint, **kwargs)


def _command(words: Sequence[str], folder: Path) -> Callable[[TurnTask, Endpoint], object]:
    if shutil.which(words[0]) is None and not os.access(folder / words[0], os.X_OK):
        raise BadSetup(f"there is no program {words[0]!r} that can be executed")

    def run(task: TurnTask, endpoint: Endpoint) -> object:
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(asdict(task), default=str).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, cwd=folder)
            except OSError as error:
                raise Unscored(f"the agent {words[0]!r} cannot be started: {error}") from error
        assert process.stdout is not None
        tail = b""  # the last line is all that is needed
        while piece := process.stdout.read(
            _MAX_LINE_BYTES
        ):  # without an end here: the driver kills this process in time
            tail = (tail + piece)[-_MAX_LINE_BYTES:]
        if process.wait():
            raise Unscored(f"the agent ended with {ending_of(process.returncode)}")
        before, _, last = tail.decode("utf-8", "replace").strip().rpartition("\n")
        if not before and len(tail) == _MAX_LINE_BYTES:
            raise Unscored(f"the last line that the agent printed has more than {_MAX_LINE_BYTES >> 20} MiB")
        try:
            return json.loads(last)
        except (ValueError, RecursionError):
            raise Unscored(f"the last line that the agent printed is not JSON: {last[:200]!r}") from None

    return run


def _result(value: object) -> JsonObject:
    if isinstance(value, Mapping) and set(value) == {"answer"}:
        value = value["answer"]
    if isinstance(value, str):
        if len(value) > _MAX_ANSWER_CHARACTERS:
            raise Unscored(f"the agent's answer has {len(value)} characters: at most {_MAX_ANSWER_CHARACTERS} are read")
        return {"answer": encodable(value)}
    if value is None:
        raise Unscored("the agent returned None: a number, named numbers, or a text to judge is needed")
    reward, parts = to_reward(value)
    return {"reward": reward, "parts": {encodable(name)[:100]: part for name, part in parts.items()}}


def _kill_children(kept: int) -> None:
    """What the agent has started, but `kept`. Again until there is none: a child may start another before it dies."""
    while children := [child for child in psutil.Process().children(recursive=True) if child.pid != kept]:
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        _, alive = psutil.wait_procs(children, timeout=_KILL_GRACE_S)
        if alive:
            return
