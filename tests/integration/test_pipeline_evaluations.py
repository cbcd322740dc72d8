"""What a pipeline measures again, what it only sums up again, and what its gate then has to judge again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import tiny_runs
import yaml

from posttrain.apps.evaluate.model import EvaluatedModel
from posttrain.apps.ship.pipeline.records import read_iterations
from posttrain.cli.main import main

PRICE, HUGE_PRICE = "eval.gpu_hour_price=1", "eval.gpu_hour_price=1e18"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a pipeline that has run as far as the gate, whose evaluation set is a folder."""
    world = tiny_pipelines.save_world(tmp_path_factory.mktemp("world"))
    (world / "set").mkdir()
    (world / "problems.jsonl").rename(world / "set" / "problems.jsonl")
    gate = dict(tiny_pipelines.GATE)
    gate["checks"] = {**gate["checks"], "cost": {"metric": "cost_per_answer", "at_most": 1000.0}}
    (world / "gate.yaml").write_text(yaml.safe_dump(gate))
    tiny_pipelines.write_file(world / "pipeline.yaml", settings(world))
    assert run(world, PRICE) == 0
    return world


def settings(world: Path) -> dict[str, Any]:
    values = tiny_pipelines.settings(world, world / "home")
    values["train"]["overrides"].append("dpo.max_num_steps=8")
    values["evaluate"]["main"]["overrides"][0] = f"data.dataset_name={world / 'set'}"
    return values


def run(world: Path, *overrides: str, dry: bool = False) -> int:
    evaluated = json.dumps([*settings(world)["evaluate"]["main"]["overrides"], *overrides])
    how = ["--dry-run"] if dry else []
    words = ["pipeline", "run", str(world / "pipeline.yaml"), "--until", "gate", *how]
    return main([*words, f"evaluate.main.overrides={evaluated}"])


def what_would_run(world: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, str]:
    capsys.readouterr()
    assert run(world, *overrides, dry=True) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}


def test_another_price_is_judged_anew_without_asking_anything_again(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: EvaluatedModel) -> None:
        raise AssertionError("a model was asked")

    monkeypatch.setattr(EvaluatedModel, "start", fail)
    assert run(world, HUGE_PRICE) == 3, "the gate sees the cost of now"
    assert run(world, PRICE) == 0
    (iteration,) = read_iterations(world / "home")
    record = iteration.record("evaluate")
    assert record is not None
    summary = json.loads((record.folder / record.outcome.values["candidate"]["main"] / "summary.json").read_text())
    assert summary["cost_per_answer"] < 1000, "what a finished stage refers to is what it has seen"
    assert record.outcome.values["num_devices"] == 1, "what its hours are counted with"


def test_a_folder_of_problems_counts_by_what_is_in_it(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = world / "set" / "problems.jsonl"
    before = file.read_text()
    assert "unchanged" in what_would_run(world, capsys, PRICE)["evaluate"]
    tiny_runs.write_rows(file, [json.loads(line) for line in before.splitlines()[:4]])
    assert f"{file} changed" in what_would_run(world, capsys, PRICE)["evaluate"]
    file.write_text(before)


def test_a_tokenizer_of_its_own_is_a_setting_of_the_evaluation(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = what_would_run(world, capsys, PRICE, f"tokenizer.name={world / 'base'}")
    assert "main.tokenizer.name changed" in said["evaluate"]
