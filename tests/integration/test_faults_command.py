"""`posttrain faults`: a run that is killed equals one that is not, and a difference is found."""

import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.apps.demo import kills
from posttrain.cli.main import main


@pytest.mark.parametrize("argument", ["--kills=0", "--steps=0"])
def test_numbers_below_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert main(["faults", "--folder", str(tmp_path / "new"), argument]) == 64
    assert argument.partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["faults", "--folder", str(tmp_path)]) == 64
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_killed_run_is_equal_and_a_changed_weight_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "SFT_STEPS", 2)
    assert kills.run(tmp_path / "runs", 1, 1, 6, None) == 0
    assert "6 steps, killed 1 times and resumed: equal, bit for bit" in capsys.readouterr().out
    assert (tmp_path / "runs/kills.svg").read_text().startswith("<svg")

    whole, killed = tmp_path / "runs/whole", tmp_path / "runs/killed"
    rows = kills._rows(whole)
    assert kills._differences(whole, killed, rows, kills._rows(killed), 6) == []
    file = next((killed / "step_6/policy/weights").rglob("*.safetensors"))
    weights = load_file(file)
    name = next(iter(weights))
    weights[name] = torch.nextafter(weights[name], weights[name] + 1)
    save_file(weights, file, metadata={"format": "pt"})
    assert kills._differences(whole, killed, rows, rows, 6) == ["final weights"]


def test_a_run_that_ends_before_it_is_killed_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "SHORTEST_S", 600.0)
    log = tmp_path / "x-killed.log"
    works = [sys.executable, "-c", "print('ran')"]
    assert kills._both("x", works, works, tmp_path, 3, random.Random(0)) == 0
    assert log.read_text() == "ran\n"
    with pytest.raises(SystemExit, match=r"ended with .*64.*; see .*x-killed\.log"):
        kills._both("x", works, [sys.executable, "-c", "raise SystemExit(64)"], tmp_path, 3, random.Random(0))
