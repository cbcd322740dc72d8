"""What the gate measures of an evaluation (refusals, formats, costs, lengths), and errors in a candidate's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gate_folders import write_evaluation

from posttrain.apps.evaluate.results import Evaluation
from posttrain.apps.ship.gate import GateResult, judge
from posttrain.apps.ship.gate.measures import beginning
from posttrain.config.gate import GateConfig
from posttrain.errors import InputError
from posttrain.reporting.doctor import Finding
from posttrain.reporting.examination import errors_of_model
from posttrain.reporting.run_files import append_rows


def decided(checks: dict[str, dict[str, Any]], candidate: Evaluation) -> GateResult:
    return judge(GateConfig.model_validate({"checks": checks}), {"main": candidate}, None)


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request.", True),
        ("I\u2019m sorry, but I can\u2019t help with that.", True),
        ("I\u02bcm afraid I can not do that.", True),
        ("Sorry, I can\u2019t do that.", True),
        ("As an AI language model, I cannot do this.", True),
        ("I must decline to answer.", True),
        ("<think>The user wants X. I should refuse.</think>\nI won't provide instructions for that.", True),
        ("<think>I can't help with that? I can.</think> The answer is 4.", False),
        ("Sorry for the delay! 2 + 2 is 4.", False),
        ("We can't divide by zero, so x is not 0.", False),
        ("The answer is 4. " + "x" * 400 + " I cannot assist with more.", False),
    ],
)
def test_refusals_are_recognised_by_their_beginning(tmp_path: Path, text: str, refuses: bool) -> None:
    found = write_evaluation(tmp_path / "a", [[0.0]] * 30, text=lambda index, _: text)
    (rule,) = decided({"a": {"metric": "refusal_rate", "at_least": 0.0}}, found).rules
    assert rule.candidate == float(refuses), beginning(text)


@pytest.mark.parametrize("apostrophe", ["'", "\u2019"])
def test_own_patterns_match_both_kinds_of_apostrophes(tmp_path: Path, apostrophe: str) -> None:
    found = write_evaluation(tmp_path / "a", [[0.0]] * 30, text=lambda index, _: "That\u2019s off limits.")
    check = {"metric": "refusal_rate", "at_least": 0.0, "patterns": [f"That{apostrophe}s off"]}
    assert decided({"a": check}, found).rules[0].candidate == 1.0


def test_format_cost_parts_and_rewards_are_measured(tmp_path: Path) -> None:
    found = write_evaluation(
        tmp_path / "a",
        [[0.5, 1.0]] * 40,
        text=lambda index, _: f"#### {index}" if index % 4 else "no idea",
        num_tokens=lambda index: 10 + index,
        parts=lambda reward: {"brevity": reward / 2},
        cost=8.0,
    )

    def mean(metric: str, **more: Any) -> float:
        (rule,) = decided({"a": {"metric": metric, "at_least": 0.0, **more}}, found).rules
        assert rule.candidate is not None
        return rule.candidate

    assert mean("format_rate", patterns=[r"^#### \d+$"]) == 0.75
    assert mean("refusal_rate", patterns=["no idea"]) == 0.25, "with patterns of one's own"
    assert mean("cost_per_answer") == pytest.approx(8.0 / 80)
    assert mean("part:brevity") == pytest.approx(0.375)
    assert mean("reward") == mean("avg@2") == pytest.approx(0.75)
    assert mean("pass@1") == 0.5
    assert mean("pass@2") == 1.0
    with pytest.raises(InputError, match="format_rate needs `patterns`"):
        mean("format_rate")
    with pytest.raises(InputError, match="`patterns` are for format_rate and refusal_rate"):
        mean("pass@1", patterns=["x"])


def test_unreported_lengths_are_missing_not_zero(tmp_path: Path) -> None:
    found = write_evaluation(tmp_path / "a", [[1.0], [0.0]] * 100, num_tokens=lambda index: None, cost=3.0)
    with pytest.raises(InputError, match=r"'mean_length_tokens' was not measured .*reports no `usage`"):
        decided({"a": {"metric": "mean_length_tokens", "at_most": 100}}, found)
    by_answer = {"a": {"metric": "cost_per_answer", "at_most": 1.0}}
    assert decided(by_answer, found).verdict == "promote", "the cost is known all the same"


def test_unmeasured_metric_is_an_error_that_lists_the_measured_ones(tmp_path: Path) -> None:
    found = write_evaluation(tmp_path / "a", [[1.0, 0.0, 1.0, 0.0]] * 30, parts=lambda reward: {"format": reward})
    for metric, expected in (
        (
            "pass@8",
            r"'pass@8' was not measured in .*measured: pass@1…4, cons@1…4, avg@4, reward, part:format, .*num_tests",
        ),
        ("pas@1", "did you mean 'pass@1'"),
        ("part:fromat", "did you mean 'part:format'"),
        ("kl_from_base", "posttrain gate measure-kl"),
        ("cost_per_answer", "eval.gpu_hour_price"),
    ):
        with pytest.raises(InputError, match=f"checks.a: .*{expected}"):
            decided({"a": {"metric": metric, "at_least": 0.1}}, found)


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
