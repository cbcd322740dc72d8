"""A reward that teaches nothing: found while the run goes on, saved and stopped, found again, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_runs

from posttrain.cli.main import main


def test_a_sick_run_is_stopped_examined_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = tiny_runs.save_model(tmp_path / "model"), tiny_runs.save_data(tmp_path / "data")
    (data / "rewards.py").write_text("def odd(prompt, response, reference):\n    return 1.0\n")
    run = tmp_path / "run"
    arguments = [*tiny_runs.grpo(model, data, run, steps=5), "doctor.on_error=stop", "checkpointing.save_period=100"]

    assert tiny_runs.run(arguments) == 3
    assert "stopped by the doctor after step 3, saved: no-signal (error)" in capsys.readouterr().out
    assert (run / "step_3").is_dir()
    assert len(tiny_runs.rows_of(run)) == 3

    assert main(["doctor", str(run), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    (found,) = [finding for finding in report["findings"] if finding["rule"] == "no-signal"]
    assert (found["step"], found["severity"], found["metric"]) == (3, "error", "train/groups_with_signal")
    assert len(found["answers"]) == 3
    assert all(answer["reward"] == 1.0 for answer in found["answers"])

    assert tiny_runs.run([*arguments, "doctor.on_error=warn"]) == 0
    assert len(tiny_runs.rows_of(run)) == 5
    rules = [json.loads(line)["rule"] for line in (run / "findings.jsonl").read_text().splitlines()]
    assert rules.count("no-signal") == 2  # the warning of step 1 and the error of step 3; not again after the resume
