"""bench/checkpoint.py: it runs, and what it compares is the same checkpoint."""

import json
from pathlib import Path
from typing import Any

import checkpoint
import pytest


@pytest.mark.parametrize("words", [[], ["--state-dtype", "int8", "--offload-states"]])
def test_both_ways_write_the_same_bytes_and_their_times_are_reported(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    size = ["--device", "cpu", "--shape", "tiny", "--saves", "2", "--step-s", "0.05", "--folder", str(tmp_path)]
    assert checkpoint.main([*size, "--out", str(out), *words]) == 0
    report = json.loads(out.read_text())
    assert report["same_bytes"]
    assert report["checkpoint_bytes"] > 100_000
    assert report["ratio"] == pytest.approx(
        report["ways"]["at once"]["best_s"] / report["ways"]["in the background"]["best_s"]
    )
    assert len(report["ways"]["in the background"]["write_s"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "nothing is left behind"


def test_different_bytes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checkpoint.save_in_background

    def change_first(training: Any, *rest: Any) -> None:
        training.update()
        honest(training, *rest)

    monkeypatch.setattr(checkpoint, "save_in_background", change_first)
    size = ["--device", "cpu", "--shape", "tiny", "--saves", "1", "--step-s", "0.05", "--folder", str(tmp_path)]
    assert checkpoint.main(size) == 1


def test_unknown_shape_is_an_error_and_short_names_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["--device", "cpu", "--shape", "9b"]) == 64
    assert "llama-8b" in capsys.readouterr().err
    assert checkpoint.arguments(["--shape", "8b"]).shape == "llama-8b"
