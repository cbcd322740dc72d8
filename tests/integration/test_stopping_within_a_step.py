"""A run that is asked to stop anywhere within a step, and started again, is the run never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import dpo, grpo, results_of, rm, run, sft, weights_of

from posttrain.engines.native.driver import Driver
from posttrain.environments.pool import ScoringPool
from posttrain.errors import StopRequested
from posttrain.orchestration import sharded
from posttrain.policy.trainer import PolicyTrainer

STEPS = 5
ROUNDS = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
# Where to stop: a method, and at which of its calls. Five steps call each of them often enough.
SAMPLING, SCORING, UPDATING = (Driver, "step"), (ScoringPool, "_collect"), (PolicyTrainer, "update")
Arguments = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that are not stopped, by kind."""
    folders = {}
    for kind, arguments in kinds(model, data).items():
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        assert run(arguments(folders[kind])) == 0
    return folders


def kinds(model: Path, data: Path) -> dict[str, Arguments]:
    last_only = "checkpointing.save_period=100"  # so that a stop has something to save
    return {
        "grpo": lambda folder: [*grpo(model, data, folder, steps=STEPS), last_only],
        "rounds": lambda folder: [*grpo(model, data, folder, steps=STEPS), last_only, *ROUNDS],
        "dpo": lambda folder: [*dpo(model, data, folder, steps=STEPS), last_only],
        "rm": lambda folder: [*rm(model, data, folder, steps=STEPS), last_only],
        "sft": lambda folder: [*sft(model, data, folder, steps=STEPS), last_only],
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], call: int) -> list[int]:
    """Send SIGTERM to this process at the start of a call, once, and let everything that listens hear it."""
    owner, name = place
    original = getattr(owner, name)
    calls = [0]

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
            while any(thread.name == "stopping" for thread in threading.enumerate()):
                time.sleep(0.001)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_ranks_under_ray_stop_while_they_sample(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank is busy with `generate`, for longer than this test lasts, and hears of the stop beside it."""
    sampled = ["grpo.num_prompts_per_step=20", "grpo.num_generations_per_prompt=100"]
    sampled += ["policy.train_global_batch_size=2000"]
    endless = ["policy.generation.max_new_tokens=50", "policy.generation.ignore_eos=true", "grpo.val_period=0"]
    arguments = [*grpo(model, data, tmp_path / "run", steps=3), "cluster.launcher=ray", *sampled, *endless]
    gather = sharded.gather

    ended: list[str] = []

    def stopping_gather(operation: str, pending: list[Any], *unit: str) -> list[Any]:
        if operation == "generate":
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            return gather(operation, pending, *unit)
        except StopRequested:
            ended.append(operation)
            raise

    monkeypatch.setattr(sharded, "gather", stopping_gather)
    assert run(arguments) == 128 + signal.SIGTERM
    assert ended == ["generate"]
    assert "before the first step was finished" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize(
    ("kind", "place", "call", "saved"),
    [
        ("grpo", SAMPLING, 30, 2),  # a step samples 12 tokens; so does each of the two validations
        ("grpo", SCORING, 7, None),
        ("grpo", UPDATING, 3, 2),  # the first of two updates of step 2: it is finished
        ("rounds", SAMPLING, 40, None),
        ("rounds", UPDATING, 6, 3),
        ("dpo", UPDATING, 3, None),
        ("rm", UPDATING, 2, None),
        ("sft", UPDATING, 3, None),
    ],
)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    kind: str, place: Any, call: int, saved: int | None, model: Path, data: Path, whole: Any, tmp_path: Path
) -> None:
    arguments = kinds(model, data)[kind](tmp_path / "run")
    with pytest.MonkeyPatch.context() as patched:
        calls = stop_at(patched, place, call)
        code = run(arguments)
    assert calls[0] >= call, "the run got as far as that"
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run").glob("step_*"))
    assert code == (85 if steps else 128 + signal.SIGTERM)
    assert saved is None or steps == [saved]
    assert steps != [STEPS], "it was stopped before its end"
    assert run(arguments) == 0
    assert results_of(tmp_path / "run") == results_of(whole[kind])
    assert weights_of(tmp_path / "run" / f"step_{STEPS}") == weights_of(whole[kind] / f"step_{STEPS}")
