"""Models on places of their own: the numbers of a run in one process, whatever dies."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LORA, assert_same_curves, copy_until, dpo, grpo, results_of, run, save_reward_model, weights_of

pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")


STEPS = 4
LOCAL = ["cluster.launcher=local"]
ENGINE = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"
REFERENCE = ["cluster.gpus_per_node=2", "policy.reference.colocated={enabled: false, resources: {gpus_per_node: 1}}"]

AHEAD = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=1"]

pytestmark = pytest.mark.ray


def assert_same_run(folder: Path, expected: Path) -> None:
    assert results_of(folder) == results_of(expected)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(expected / f"step_{STEPS}")


@pytest.fixture(scope="module")
def reward(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(model, tmp_path_factory.mktemp("reward") / "model")


def rewarded(reward: Path) -> list[str]:
    """Instead of the reward of `grpo`."""
    block = f"{{type: reward_model, model_name: {reward}, device: cpu, precision: float32}}"
    return ["data.default.env_name=rm", f"env.rm={block}"]


def test_four_worker_groups_make_the_curves_of_one_process_and_the_same_bits_if_any_of_them_dies(
    fault_at: Callable[..., None],
    reward: Path,
    model: Path,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *rewarded(reward)]

    four = [ENGINE, *REFERENCE, "cluster.gpus_per_node=4", "env.rm.resources={gpus_per_node: 1}", *AHEAD]
    assert run([*arguments("local"), *LOCAL]) == 0
    assert run([*arguments("four"), *four[:-2]]) == 0
    assert_same_curves(tmp_path / "four", tmp_path / "local")
    assert run([*arguments("ahead"), *four]) == 0
    fault_at("score", 6)
    fault_at("reference_logprobs", 5)
    copy_until(2, tmp_path / "ahead", tmp_path / "killed")
    capfd.readouterr()
    assert run([*arguments("killed"), *four]) == 0
    error = capfd.readouterr().err
    for died in ("reward_rm 0 died during score", "reference 0 died during reference_logprobs"):
        assert died in error
    assert_same_run(tmp_path / "killed", tmp_path / "ahead")


def test_a_reference_on_a_place_of_its_own_makes_the_curves_of_a_colocated_one_also_if_it_dies(
    fault_at: Callable[..., None], model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*grpo(model, data, tmp_path / "local", steps=STEPS), *LOCAL]) == 0
    fault_at("reference_logprobs", 3)
    assert run([*grpo(model, data, tmp_path / "placed", steps=STEPS), *REFERENCE]) == 0
    assert "reference 0 died during reference_logprobs: another one is started" in capfd.readouterr().err
    assert_same_curves(tmp_path / "placed", tmp_path / "local")
    logs = {name: (tmp_path / "placed" / "logs" / f"{name}.log").read_text() for name in ("rank_0", "reference_0")}
    assert [log.count("reference_logprobs …") > 0 for log in logs.values()] == [False, True]


@pytest.mark.parametrize("kind", ["adapters", "dpo", "two"])
def test_adapters_pairs_and_two_replicas_make_the_curves_of_one_process(
    kind: str, model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        if kind == "dpo":
            return dpo(model, data, tmp_path / name, steps=STEPS)
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *(LORA if kind == "adapters" else [])]

    places = [REFERENCE[0].replace("2", "3"), REFERENCE[1].replace("1", "2")] if kind == "two" else REFERENCE
    assert run([*arguments("local"), *LOCAL]) == 0
    assert run([*arguments("placed"), *places]) == 0
    assert_same_curves(tmp_path / "placed", tmp_path / "local")


@pytest.mark.full
def test_a_whole_group_is_scored_before_the_sampling_of_its_step_ends(
    fault_at: Callable[..., None], reward: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    """The engine goes on from its first whole group when a reward worker has begun to score, or after a minute."""
    order = tmp_path / "order"

    def note(what: str) -> None:
        with order.open("a") as file:
            file.write(f"{what}\n")

    def sampling_waits(actor: Any) -> None:
        own_tell, own_generate = actor.rank.engine.when_whole, actor.rank.generate

        def tell(group: object) -> None:
            own_tell(group)
            end = time.monotonic() + 60
            while not order.exists() and time.monotonic() < end:
                time.sleep(0.01)

        def generate(*args: Any) -> Any:
            sampled = own_generate(*args)
            note("sampled")
            return sampled

        actor.rank.engine.when_whole, actor.rank.generate = tell, generate

    def scoring_is_noted(actor: Any) -> None:
        own = actor.rank.score

        def score(*args: Any) -> Any:
            note("scored")
            return own(*args)

        actor.rank.score = score

    # Both from the second step on: each step has four groups.
    fault_at("generate", 1, lambda actor: actor.__ray_call__.remote(sampling_waits))
    fault_at("score", 4, lambda actor: actor.__ray_call__.remote(scoring_is_noted))
    words = [*grpo(model, data, tmp_path / "run", steps=2), *rewarded(reward), "grpo.val_period=0"]
    assert run([*words, "cluster.gpus_per_node=2", "env.rm.resources={gpus_per_node: 1}"]) == 0
    found = order.read_text().split()
    assert found[0] == "scored"
    assert sorted(found) == ["sampled", *["scored"] * 4]


@pytest.mark.full
def test_answers_that_three_reward_workers_died_with_are_unscored(
    fault_at: Callable[..., None],
    reward: Path,
    model: Path,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for count in (6, 7, 8):  # a group of the second step, and both repetitions
        fault_at("score", count)
    words = [*grpo(model, data, tmp_path / "run", steps=3), *rewarded(reward), "grpo.val_period=0"]
    assert run([*words, "cluster.gpus_per_node=2", "env.rm.resources={gpus_per_node: 1}"]) == 0
    # Twice for the group, and for the next one, which finds none.
    assert capfd.readouterr().err.count("reward_rm 0 died during score: another one is started") == 3
    assert [row["train/unscored"] for row in results_of(tmp_path / "run")] == [0, 4, 0]
    with gzip.open(tmp_path / "run" / "rollouts" / "step_2.jsonl.gz", "rt") as file:
        groups = [[answer["reward"] for answer in json.loads(line)["completions"]] for line in file]
    # Groups are scored in the order in which they became whole.
    assert sorted(sum(reward is None for reward in group) for group in groups) == [0, 0, 0, 4]
    assert 0 not in {reward for group in groups for reward in group}
