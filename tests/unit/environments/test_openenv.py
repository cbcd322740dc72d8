"""Environments of OpenEnv, with the real package in its own Python: the one that `openenv init` writes, and a game."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from foreign_pythons import OPENENV, needs_openenv

from posttrain.config.data import EnvironmentConfig
from posttrain.environments import check_environments, side_process
from posttrain.environments.settings import read_turns
from posttrain.environments.turns import TurnTask
from posttrain.environments.turns.interface import TurnItem
from posttrain.environments.turns.openenv import OpenEnv
from posttrain.environments.turns.pool import TurnOutcome, TurnRouter
from posttrain.environments.turns.replay import History
from posttrain.errors import InputError
from posttrain.types import Score

GAME = """
import os, random, time
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Answer(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(episode_id="x", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.wanted = random.Random(seed).randrange(100)
        return Answer(text=f"0 to 99, seed {seed}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == -1:
            os._exit(7)
        if action.number == -2:
            time.sleep(600)
        if action.number == -3:
            raise RuntimeError("broken")
        self._state.step_count += 1
        is_right = action.number == self.wanted
        text = "right" if is_right else "higher" if action.number < self.wanted else "lower"
        return Answer(text=f"{text} ({self._state.step_count})", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return self._state

app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=4, env_name="game")
"""


class Conversation:
    def __init__(self, router: TurnRouter, name: str, **metadata: Any) -> None:
        self.router, self.name = router, name
        (begun,) = router.ask([("it", TurnItem("reset", "key", TurnTask("?", [], None, metadata)))])
        assert isinstance(begun, TurnOutcome), begun
        self.state = begun.state

    def say(self, text: str) -> Score:
        item = TurnItem("step", state=self.state, response=text, conversation=self.name)
        (outcome,) = self.router.ask([("it", item)])
        if isinstance(outcome, TurnOutcome) and not outcome.done:
            self.state = outcome.state
        return outcome

    def reads(self, text: str) -> str:
        outcome = self.say(text)
        assert isinstance(outcome, TurnOutcome), outcome
        return "\n".join(message["content"] for message in outcome.observation)


def block(num_workers: int = 1, timeout_s: float = 60, **kwargs: Any) -> dict[str, Any]:
    settings = {"num_workers": num_workers, "timeout_s": timeout_s, "python": OPENENV}
    return {"turns": "openenv", "turns_kwargs": kwargs, **settings}


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openenv") / "game"
    (folder / "server").mkdir(parents=True)
    for package in (folder, folder / "server"):
        (package / "__init__.py").touch()
    (folder / "server" / "app.py").write_text(GAME)
    return folder


@pytest.fixture(scope="module")
def router(game: Path) -> Iterator[TurnRouter]:
    with closing(TurnRouter(read_turns({"it": block(package=str(game), observation="text")}))) as made:
        yield made


def sides() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if any("posttrain_openenv.py" in word for word in one.cmdline())]


@pytest.mark.parametrize("text", ["nan", "-inf", "9" * 400, "one"])
def test_a_number_that_cannot_be_sent_is_for_the_model_to_read(text: str) -> None:
    environment = object.__new__(OpenEnv)
    environment._field, environment._actions, environment._metrics = "guess", {"guess": {"type": "number"}}, ()
    for field, action in (("guess", text), (None, "[" * 100_000)):
        environment._field = field
        turn = environment.step(History(), action)
        assert (str(turn.observation)[:7], turn.counts) == ("error: ", {"malformed_actions": 1})


@needs_openenv
def test_the_environment_that_the_package_brings_takes_turns(tmp_path: Path) -> None:
    subprocess.run([Path(OPENENV).with_name("openenv"), "init", "echo_env"], cwd=tmp_path, check=True)
    given = {"package": str(tmp_path / "echo_env"), "observation": "echoed_message", "metrics": ["message_length"]}
    with closing(TurnRouter(read_turns({"it": block(**given)}))) as router:
        first, second = Conversation(router, "first"), Conversation(router, "second")
        outcome = first.say("four")
        assert isinstance(outcome, TurnOutcome)
        assert outcome.reward == 0.4
        assert outcome.counts == {"malformed_actions": 0, "message_length": 4}
        assert second.reads("hello") == "hello"  # its server allows one session: the first is repeated when it goes on
        assert first.reads("again") == "again"
        assert len(sides()) == 1
    assert sides() == []


@needs_openenv
def test_the_seed_of_the_task_decides_and_the_game_ends_with_its_reward(router: TurnRouter) -> None:
    wanted = random.Random(3).randrange(100)
    talk = Conversation(router, "game", seed=3, first_observation="0 to 99, seed 3")
    assert talk.reads(str(wanted - 1)) == "higher (1)"
    assert "invalid literal" in talk.reads("a number?")
    assert talk.reads(f" {wanted + 1}\n") == "lower (2)"
    outcome = talk.say(str(wanted))
    assert isinstance(outcome, TurnOutcome)
    assert (outcome.done, outcome.reward) == (True, 1.0)
    differs = Conversation(router, "differs", seed=4, first_observation="0 to 99, seed 3").say("1")
    assert differs.reward is None
    assert "does not repeat itself: with {'seed': 4} it begins with" in str(differs.error)


@needs_openenv
def test_failures_leave_rollouts_unscored_and_the_others_go_on(router: TurnRouter) -> None:
    other, raises, dies = (Conversation(router, name, seed=1) for name in ("other", "raises", "dies"))
    assert other.reads("0").endswith("(1)")
    outcome = raises.say("-3")
    assert (outcome.reward, "EXECUTION_ERROR" in str(outcome.error)) == (None, True)
    outcome = dies.say("-1")
    assert (outcome.reward, outcome.error) == (None, "the environment's process ended with exit code 7")
    assert other.reads("0").endswith("(2)")  # in a new process, where its first action was repeated


@needs_openenv
def test_a_step_that_hangs_is_given_up(game: Path) -> None:
    before = sides()
    with closing(TurnRouter(read_turns({"it": block(timeout_s=6, package=str(game), observation="text")}))) as router:
        talk = Conversation(router, "hangs")
        outcome = talk.say("-2")
        assert outcome.reward is None
        assert "did not answer within" in str(outcome.error) or "imeout" in str(outcome.error)
        assert Conversation(router, "next").reads("0").endswith("(1)")
    assert sides() == before


@needs_openenv
@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({}, "either base_url (of a server) or package"),
        ({"base_url": "http://127.0.0.1:1"}, "http://127.0.0.1:1/health does not answer"),
        ({"package": "no_such_package"}, "the package 'no_such_package' has no server at 'server.app:app'"),
        ({"package": "{game}", "field": "numbr"}, "an action has no field 'numbr': one of number is needed"),
        ({"package": "{game}", "observation": "txt"}, "an observation has no 'txt'; it has text"),
    ],
)
def test_bad_arguments_are_refused_before_the_run(kwargs: dict[str, Any], problem: str, game: Path) -> None:
    given = {name: value.replace("{game}", str(game)) for name, value in kwargs.items()}
    with pytest.raises(InputError, match=r"env\.it\.turns cannot start") as refused:
        check_environments({"it": block(**given)})
    assert problem in str(refused.value)


def test_a_python_without_the_package_is_refused_before_the_run(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec /usr/bin/env python3 -S "$@"\n')
    bare.chmod(0o755)
    for python, problem in ((bare, "has no openenv: openenv>=0.10,<0.11 is needed"), ("/none", "cannot be started")):
        with pytest.raises(InputError, match=problem):
            check_environments({"it": {**block(package="game"), "python": str(python)}})


SHOWS_VARIABLES = """
import os, sys
sys.path.insert(0, SIDE)
from posttrain_side import serve
serve(lambda setup: (dict(os.environ), None))
"""


def test_programs_of_packages_get_no_credential_that_they_were_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows.py").write_text(SHOWS_VARIABLES.replace("SIDE", repr(str(side_process._SIDE))))
    monkeypatch.setattr(side_process, "_SIDE", tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    side = side_process.SideProcess(None, "shows.py", {}, 10.0, {"HF_TOKEN": None, "GIVEN": "1"})
    side.end()
    assert [name for name, value in side.about.items() if value == "secret"] == ["HF_TOKEN"]
    assert side.about["GIVEN"] == "1"
    assert "PYTHONPATH" not in side.about
    assert "127.0.0.1" in side.about["NO_PROXY"].split(",")
    block = {"turns": "openenv", "turns_kwargs": {"package": "p"}, "env": {"A": "1"}}
    assert read_turns({"it": block})["it"].config.model_dump()["kwargs"]["env"] == {"A": "1"}
    for refused in ({"turns": "mcp"}, {"type": "math"}):
        (problem,) = EnvironmentConfig.model_validate({**refused, "env": {"A": "1"}}).turns_problems("it")
        assert problem.startswith("env.it.env has variables for an agent")
