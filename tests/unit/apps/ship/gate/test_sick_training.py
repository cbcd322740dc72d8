"""A candidate whose training the doctor found an error in."""

from __future__ import annotations

from pathlib import Path

from gate_folders import write_evaluation

from posttrain.apps.ship.gate import judge
from posttrain.config.gate import GateConfig
from posttrain.reporting.doctor import Finding
from posttrain.reporting.examination import errors_of_model
from posttrain.reporting.run_files import append_rows


def sick_run(folder: Path) -> Path:
    folder.mkdir()
    found = Finding(
        20, "kl-runaway", "error", "train/kl_penalty", 2.0, "the policy is leaving", ("lr=1e-6",), "a guide"
    )
    note = Finding(5, "length-explosion", "note", "train/mean_generation_length", 40.0, "answers grew", (), "ours")
    append_rows(folder / "findings.jsonl", [note.to_json(), found.to_json()])
    return folder


def gate(on_error: str) -> GateConfig:
    checks = {"solves": {"metric": "pass@1", "evaluation": "main", "at_least": 0.5}}
    return GateConfig.model_validate({"gate": {"on_doctor_error": on_error}, "checks": checks})


def test_errors_of_a_run_and_of_its_checkpoints(tmp_path: Path) -> None:
    run = sick_run(tmp_path / "run")
    assert [error.rule for error in errors_of_model(str(run))] == ["kl-runaway"]
    assert [error.rule for error in errors_of_model(str(run / "step_20"))] == ["kl-runaway"]
    assert errors_of_model(str(run / "step_19")) == []
    assert errors_of_model("Qwen/Qwen3-0.6B") == []


def test_an_error_in_training_is_noted_or_rejects(tmp_path: Path) -> None:
    model = str(sick_run(tmp_path / "run"))
    candidate = {"main": write_evaluation(tmp_path / "eval", [[1.0]] * 60, model=model)}
    noted = judge(gate("note"), candidate, None)
    assert noted.verdict == "promote"
    assert any("kl-runaway (error) at step 20" in note for note in noted.notes)
    rejected = judge(gate("reject"), candidate, None)
    assert rejected.verdict == "reject"
    assert any("kl-runaway" in reason for reason in rejected.reasons)


def test_a_sound_training_is_not_mentioned(tmp_path: Path) -> None:
    candidate = {"main": write_evaluation(tmp_path / "eval", [[1.0]] * 60)}
    assert judge(gate("reject"), candidate, None).verdict == "promote"
    assert judge(gate("note"), candidate, None).notes == ()
