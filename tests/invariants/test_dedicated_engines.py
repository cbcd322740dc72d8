"""Engines on places of their own: what they sample, what is left of a run when they die, and how it resumes."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LORA, assert_same_curves, copy_until, grpo, results_of, run, save_model, trained_draws, weights_of

from posttrain.orchestration import deadlines, sharded

ray = pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

from ray.actor import ActorHandle  # noqa: E402

STEPS = 4
LOCAL = ["cluster.launcher=local"]
DEDICATED = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
AGE_2 = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]

pytestmark = pytest.mark.ray


@dataclass(frozen=True)
class Ahead:
    """A run whose rounds sample ahead, and the arguments of others like it."""

    model: Path
    data: Path
    whole: Path

    def arguments(self, folder: Path) -> list[str]:
        return [*grpo(self.model, self.data, folder, steps=STEPS), *DEDICATED, *AGE_2]


@pytest.fixture(scope="module")
def ahead(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Ahead:
    found = Ahead(model, data, tmp_path_factory.mktemp("ahead") / "whole")
    assert run(found.arguments(found.whole)) == 0
    return found


def assert_same_run(folder: Path, expected: Path) -> None:
    assert results_of(folder) == results_of(expected)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(expected / f"step_{STEPS}")


@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_a_synchronous_run_has_the_bits_of_a_colocated_one(
    adapters: list[str], model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *adapters]

    assert run([*arguments("colocated"), *LOCAL]) == 0
    assert run([*arguments("dedicated"), *DEDICATED]) == 0
    assert_same_run(tmp_path / "dedicated", tmp_path / "colocated")


def test_a_run_that_samples_ahead_resumes_with_the_same_bits(ahead: Ahead, tmp_path: Path) -> None:
    ages = [row["train/trajectory_age_max"] for row in results_of(ahead.whole) if "train/loss" in row]
    assert ages[0] == 0
    assert min(ages[1:]) >= 1, "sampled while the step before was trained"
    assert max(ages) <= 2
    assert sorted(trained_draws(ahead.whole, STEPS)) == list(range(STEPS * 4))
    copy_until(2, ahead.whole, tmp_path / "resumed")
    assert run(ahead.arguments(tmp_path / "resumed")) == 0
    assert_same_run(tmp_path / "resumed", ahead.whole)


@pytest.mark.parametrize("place", ["update", "reference_logprobs"])
def test_a_run_that_is_stopped_while_it_samples_ahead_resumes_with_the_same_bits(
    place: str, ahead: Ahead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before step 3's first update, which is undone with the round ahead; in it, so that both are finished."""
    gather, num_calls = sharded.gather, 0

    def stopping_gather(operation: str, pending: list[Any], *unit: str) -> list[Any]:
        nonlocal num_calls
        num_calls += operation == place
        if operation == place and num_calls == (5 if place == "update" else 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return gather(operation, pending, *unit)

    arguments = [*ahead.arguments(tmp_path / "run"), "checkpointing.save_period=100", "policy.logprob_batch_size=16"]
    with monkeypatch.context() as patched:
        patched.setattr(sharded, "gather", stopping_gather)
        assert run(arguments) == 85
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_3" if place == "update" else "step_2"]
    assert run(arguments) == 0
    assert_same_run(tmp_path / "run", ahead.whole)


def test_two_ranks_and_two_engines_make_the_curves_of_one_process(model: Path, data: Path, tmp_path: Path) -> None:
    places = ["cluster.gpus_per_node=4", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"]
    assert run([*grpo(model, data, tmp_path / "local", steps=STEPS), *LOCAL]) == 0
    assert run([*grpo(model, data, tmp_path / "four", steps=STEPS), *places]) == 0
    assert_same_curves(tmp_path / "four", tmp_path / "local")


# -- engines of two parts ----------------------------------------------------------------------------------------------

TWO_PARTS = [
    "cluster.gpus_per_node=3",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
    "policy.generation.vllm_cfg.tensor_parallel_size=2",
]


@pytest.fixture(scope="module")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose heads two processes can share."""
    return save_model(tmp_path_factory.mktemp("even") / "model", num_kv_heads=2)


def test_an_engine_of_two_parts_samples_as_one_that_holds_the_whole_model_and_survives_the_death_of_a_part(
    fault_at: Callable[..., None], even_model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(even_model, data, tmp_path / name, steps=STEPS), *AGE_2]

    assert run([*arguments("whole"), *DEDICATED]) == 0
    assert run([*arguments("parts"), *TWO_PARTS]) == 0
    assert_same_curves(tmp_path / "parts", tmp_path / "whole")
    assert sampled_answers(tmp_path / "parts") == sampled_answers(tmp_path / "whole")
    logs = {file.name for file in (tmp_path / "parts" / "logs").iterdir()}
    assert logs >= {"engine_0_part_0.log", "engine_0_part_1.log"}
    fault_at("sample_round", 4)  # the second part of the engine, in the second round
    assert run([*arguments("killed"), *TWO_PARTS]) == 0
    assert "engine 0 died during sample_round: another one is started" in capfd.readouterr().err
    assert_same_run(tmp_path / "killed", tmp_path / "parts")


@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_ranks_that_share_layers_hand_their_parts_to_an_engine_of_two_parts(
    adapters: list[str], even_model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(even_model, data, tmp_path / name, steps=2), *adapters]

    places = ["cluster.gpus_per_node=4", *TWO_PARTS[1:], "policy.dtensor_cfg.tensor_parallel_size=2"]
    assert run([*arguments("local"), *LOCAL]) == 0
    assert run([*arguments("four"), *places]) == 0
    assert_same_curves(tmp_path / "four", tmp_path / "local")


def sampled_answers(folder: Path) -> list[Any]:
    files = [folder / "rollouts" / f"step_{step}.jsonl.gz" for step in range(1, STEPS + 1)]
    rows = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    answers = [answer for row in rows for answer in row["completions"]]
    return [(answer["text"], answer["num_tokens"], answer["versions"]) for answer in answers]


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant
def test_an_engine_that_is_killed_is_replaced_and_the_run_has_the_same_bits(
    fault_at: Callable[..., None], ahead: Ahead, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault_at("receive_weights", 2)
    fault_at("sample_round", 3)
    assert run(ahead.arguments(tmp_path / "killed")) == 0
    error = capfd.readouterr().err
    assert "engine 0 died during receive_weights: another one is started" in error
    assert "engine 0 died during sample_round: another one is started" in error
    assert_same_run(tmp_path / "killed", ahead.whole)


def test_a_run_that_loses_a_rank_starts_again_by_itself_and_has_the_same_bits(
    fault_at: Callable[..., None], ahead: Ahead, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault_at("update", 6)  # in step 3: the checkpoint is that of step 2
    assert run([*ahead.arguments(tmp_path / "lost"), "cluster.max_restarts=1"]) == 0
    error = capfd.readouterr().err
    assert "rank 0 died during training (update)" in error
    assert "restart 1 of 1" in error
    assert_same_run(tmp_path / "lost", ahead.whole)
    logs = [(tmp_path / "lost" / "logs" / f"{name}.log").read_text() for name in ("rank_0", "engine_0")]
    assert [log.count(" build …") for log in logs] == [2, 2], "both attempts"


def test_an_engine_that_hangs_is_named_within_the_deadline(
    fault_at: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    ahead: Ahead,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def prepare(actor: ActorHandle) -> None:
        """For the next round, which has not begun: earlier ones may take longer."""
        pids.append(pid_of(actor))
        monkeypatch.setitem(deadlines.OPERATIONS["sample_round"], "deadline_s", 3.0)

    pids: list[int] = []
    fault_at("receive_weights", 2, prepare)
    fault_at("sample_round", 3, lambda actor: os.kill(pids[0], signal.SIGSTOP))
    assert run(ahead.arguments(tmp_path / "run")) == 1
    error = capfd.readouterr().err
    assert "engine 0 of 1 has not finished sample_round within 3 s" in error


def pid_of(actor: ActorHandle) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60))
