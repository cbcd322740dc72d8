"""GRPO with vLLM as the sampler, in an environment of its own: with the stand-in, and with vLLM where there is one."""

from __future__ import annotations

import gzip
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import vllm_pythons

from posttrain.cli.main import main
from posttrain.policy.trainer import PolicyTrainer

STEPS = 4


class World:
    """A model, its data, and an interpreter that has vLLM or the stand-in."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        self.data = root / "data"
        self.data.mkdir()
        # vLLM's attention has no heads smaller than 32.
        self.model = tiny_runs.save_model(root / "model", hidden_size=64, num_kv_heads=2)
        tiny_runs.write_rows(self.data / "questions.jsonl", tiny_runs.questions(20))
        tiny_runs.write_rows(self.data / "held_out_questions.jsonl", tiny_runs.questions(4, seed=1))
        (self.data / "rewards.py").write_text(tiny_runs.ODD_CHARACTERS)

    def run(self, name: str, *extra: str, steps: int = STEPS) -> tuple[int, Path]:
        folder = self.root / name
        words = tiny_runs.grpo(self.model, self.data, folder, steps=steps)
        words += ["policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={self.python}", *extra]
        return main(words), folder


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/reward" in row]


def answers(folder: Path, step: int) -> list[str]:
    with gzip.open(folder / "rollouts" / f"step_{step}.jsonl.gz", "rt") as file:
        return file.read().splitlines()


@pytest.fixture(scope="module", params=["stand-in", "vllm"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("vllm-run")
    if request.param == "stand-in":
        return World(root, vllm_pythons.stand_in(root / "stand-in"))
    if not vllm_pythons.REAL:
        pytest.skip(vllm_pythons.NO_REAL)
    return World(root, vllm_pythons.REAL)


def test_vllm_samples_with_the_weights_of_each_step_and_a_resumed_run_repeats_it(world: World) -> None:
    code, whole = world.run("whole")
    assert code == 0
    for row in rows(whole):
        assert (
            row["train/token_mult_prob_error"] < 1.001
        )  # after one update at this learning rate, stale weights are at 1.1
        assert row["train/is_oob_ratio"] == 0  # truncated importance sampling is on
    assert world.run("parts", steps=2)[0] == 0
    code, parts = world.run("parts")
    assert code == 0
    for step in range(1, STEPS + 1):
        assert answers(parts, step) == answers(whole, step)


def test_a_vllm_that_keeps_old_weights_stops_the_run(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    if world.python == vllm_pythons.REAL:
        pytest.skip("the stand-in can leave its weights as they are")
    fault = Path(world.python).with_name("fault")
    fault.write_text("stale")
    try:
        code, folder = world.run("stale")
    finally:
        fault.unlink()
    assert code == 1
    assert "step 1: the sampler's log-probabilities are not the trainer's" in capfd.readouterr().err
    assert not (folder / "metrics.jsonl").exists() or not rows(folder)


def test_a_run_whose_vllm_dies_starts_again_by_itself(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.python == vllm_pythons.REAL:
        pytest.skip("the stand-in can die")
    models: list[weakref.ref[PolicyTrainer]] = []
    initialise = PolicyTrainer.__init__

    def counted(self: PolicyTrainer, *args: Any, **options: Any) -> None:
        assert not any(model() for model in models), "the lost run's model is still in memory"
        models.append(weakref.ref(self))
        initialise(self, *args, **options)

    monkeypatch.setattr(PolicyTrainer, "__init__", counted)
    Path(world.python).with_name("fault").write_text("die")
    code, folder = world.run("lost", "cluster.max_restarts=1", "grpo.val_period=0", steps=2)
    error = capfd.readouterr().err
    assert "ended during `generate`, signal 9 (SIGKILL)" in error
    assert "restart 1 of 1 (cluster.max_restarts)" in error
    assert code == 0
    assert len(rows(folder)) == len(models) == 2


def test_rounds_carry_answers_over(world: World) -> None:
    code, folder = world.run("rounds", "grpo.async_grpo.enabled=true", "grpo.val_period=0", steps=3)
    assert code == 0
    draws = [json.loads(line)["draw"] for step in range(1, 4) for line in answers(folder, step)]
    assert sorted(draws) == list(range(12))


def test_a_vllm_of_two_processes_on_places_of_its_own_samples_ahead(world: World) -> None:
    """One rank, and one engine on two places, whose vLLM splits the layers itself."""
    pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")
    code, folder = world.run(
        "two",
        "cluster.gpus_per_node=3",
        "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "policy.generation.vllm_cfg.check_period=1",
        "grpo.async_grpo.enabled=true",
        "grpo.val_period=0",
        steps=3,
    )
    assert code == 0
    assert [row["train/trajectory_age_max"] for row in rows(folder)] == [0, 1, 1]
    assert {file.name for file in (folder / "logs").glob("*_*.log")} == {"rank_0.log", "engine_0.log"}
    if world.python != vllm_pythons.REAL:
        weights = Path(Path(world.python).with_name("weights").read_text())
        assert weights.name.startswith("posttrain-weights-")
        assert not weights.exists(), "what is in shared memory outlives no run"


def test_adapters_are_pushed_alone(world: World) -> None:
    if world.python != vllm_pythons.REAL:
        pytest.skip("the stand-in has no adapters")
    code, folder = world.run("lora", "policy.dtensor_cfg.lora_cfg.enabled=true")
    assert code == 0
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows(folder))
