"""GRPO of a mixture of experts whose sampler records its choice: vLLM (a stand-in), and the native engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_runs
import vllm_pythons

from posttrain.cli.main import main

REPLAY = "policy.router_replay.enabled=true"


class World:
    def __init__(self, root: Path) -> None:
        self.root, self.data, self.model = root, root / "data", root / "model"
        self.data.mkdir()
        tiny_runs.save_expert_model(self.model)
        tiny_runs.write_rows(self.data / "questions.jsonl", tiny_runs.questions(20))
        tiny_runs.write_rows(self.data / "held_out_questions.jsonl", tiny_runs.questions(4, seed=1))
        (self.data / "rewards.py").write_text(tiny_runs.ODD_CHARACTERS)
        self.python = vllm_pythons.stand_in(root / "stand-in")
        Path(self.python).with_name("fault").write_text("routers")  # it chooses other experts than the trainer

    def run(self, name: str, *extra: str, steps: int = 2) -> tuple[int, list[dict[str, float]]]:
        folder = self.root / name
        code = main([*tiny_runs.grpo(self.model, self.data, folder, steps=steps), "grpo.val_period=0", *extra])
        lines = (folder / "metrics.jsonl").read_text().splitlines() if code == 0 else []
        return code, [row for row in map(json.loads, lines) if "train/reward" in row]

    @property
    def vllm(self) -> list[str]:
        return ["policy.generation.backend=vllm", f"policy.generation.vllm_cfg.python={self.python}"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("replay"))


@pytest.mark.full
def test_the_choice_of_another_sampler_is_replayed(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    code, rows = world.run("replayed", *world.vllm, REPLAY)
    assert code == 0
    for row in rows:
        assert row["train/token_mult_prob_error"] < 1.001
        assert 0.2 < row["train/router_mismatch"] <= 1.0
    capfd.readouterr()
    assert world.run("own", *world.vllm)[0] != 0
    assert "the sampler's log-probabilities are not the trainer's" in capfd.readouterr().err


def test_the_native_engine_and_the_trainer_choose_the_same_experts(world: World) -> None:
    one_update = "policy.train_global_batch_size=16"  # a second one would choose with other weights
    code, rows = world.run("native", REPLAY, one_update, steps=1)
    assert code == 0
    assert rows[0]["train/router_mismatch"] == 0.0
    assert rows[0]["train/token_mult_prob_error"] < 1.00001
    assert 1.0 <= rows[0]["train/expert_load_max"] <= 8.0
    assert 0.0 < rows[0]["train/router_entropy"] < 1.0
