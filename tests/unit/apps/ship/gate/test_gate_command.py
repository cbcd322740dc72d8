"""`posttrain gate` as a user meets it: tables, files, exit codes, errors."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from gate_folders import write_evaluation

from posttrain.cli.main import main

GATE = """\
gate:
  confidence: 0.95
checks:
  accuracy:
    metric: pass@1
    better_by: 0.0
"""
EXAMPLE = Path(__file__).parents[5] / "configs" / "gate.yaml"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, share, seed in (("old", 0.5, 1), ("good", 0.75, 2), ("same", 0.5, 3), ("bad", 0.25, 4)):
        draws = random.Random(seed)
        rewards = [[float(draws.random() < share)] for _ in range(200)]
        write_evaluation(tmp_path / name, rewards, text=lambda index, reward: f"#### {index}", model=name)
    (tmp_path / "gate.yaml").write_text(GATE)
    return tmp_path


@pytest.mark.parametrize(
    ("candidate", "code", "words"), [("good", 0, "promote"), ("bad", 3, "reject"), ("same", 4, "needs more samples")]
)
def test_each_verdict_has_its_exit_code_and_reasons(
    folders: Path, capsys: pytest.CaptureFixture[str], candidate: str, code: int, words: str
) -> None:
    files = ["--json", "out/gate.json", "--html", "out/gate.html"]
    given = ["gate", "--config", "gate.yaml", "--candidate", candidate, "--production", "old", *files]
    assert main(given) == code
    printed = capsys.readouterr().out
    assert f"\n{words}\n" in printed
    assert "better than production" in printed
    report = json.loads((folders / "out" / "gate.json").read_text())
    assert report["verdict"] == words.replace(" ", "_")
    assert report["reasons"]
    assert report["candidate"]["main"]["model"] == candidate
    assert report["rules"][0]["estimate"]["num_problems"] == 200
    page = (folders / "out" / "gate.html").read_text()
    assert f"<b>{words}</b>" in page
    assert "http" not in page.replace("http-equiv", ""), "the page is self-contained"
    assert ("to decide: about" in printed) == (words == "needs more samples")


def test_example_config_works_unchanged(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--config", str(EXAMPLE), "--candidate", "good", "--production", "old"]) == 0
    capsys.readouterr()
    assert main(["gate", "--config", str(EXAMPLE), "--candidate", "bad", "--production", "old", "--json", "-"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert [rule["outcome"] for rule in report["rules"]] == ["fail", "pass", "pass", "pass"]


def test_commented_part_of_the_example_config_works(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text()
    commented = text[text.index("  # cost:") :]
    (folders / "gate.yaml").write_text("checks:\n" + re.sub("^  # ", "  ", commented, flags=re.MULTILINE))
    write_evaluation(folders / "priced", [[1.0]] * 200, cost=2.0)
    given = ["gate", "--config", "gate.yaml", "--candidate", "priced", "--production", "priced"]
    assert main(given) == 0, "at an equal cost"


def test_settings_on_the_command_line_override_the_file(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["gate", "--config", "gate.yaml", "--candidate", "good", "--production", "old"]
    assert main([*base, "checks.accuracy.better_by=0.5"]) == 3
    assert main([*base, "gate.min_problems=1000"]) == 4


def test_evaluations_are_given_by_name_or_as_a_folder(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folders / "sets").mkdir()
    (folders / "good").rename(folders / "sets" / "main")
    (folders / "same").rename(folders / "sets" / "safety")
    (folders / "gate.yaml").write_text(GATE + "  guard: {metric: pass@1, evaluation: safety, at_least: 0.3}\n")
    assert main(["gate", "--config", "gate.yaml", "--candidate", "sets", "--production", "old"]) == 0
    named = ["--candidate", "main=sets/main", "--candidate", "safety=sets/safety"]
    assert main(["gate", "--config", "gate.yaml", *named, "--production", "main=old"]) == 0
    capsys.readouterr()
    assert (
        main(["gate", "--config", "gate.yaml", "--candidate", "sets/main", "--candidate", "bad", "--no-production"])
        == 64
    )
    assert "two evaluations are called 'main'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--candidate", "good"], "--production FOLDER, or --no-production"),
        (["--candidate", "good", "--production", "old", "--no-production"], "exclude each other"),
        (["--no-production"], "--candidate is missing"),
        (["--candidate", "nowhere", "--no-production"], "nowhere: no such folder"),
        (["--candidate", "good", "--no-production"], "every check compares with production"),
        (["--candidate", "good", "--production", "old", "checks.accuracy.metric=pass@2"], "measured: pass@1, cons@1"),
        (
            ["--candidate", "good", "--production", "old", "gate.confidence=95"],
            "`gate.confidence` = 95: must be less than 1",
        ),
        (["--candidate", "good", "--production", "old", "gate.confidnce=0.9"], "did you mean `gate.confidence`?"),
    ],
)
def test_bad_input_exits_with_64_and_names_the_problem(
    folders: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert main(["gate", "--config", "gate.yaml", "--json", "gate.json", *arguments]) == 64
    assert expected in capsys.readouterr().err
    assert not (folders / "gate.json").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("checks: {}", "`checks` = a map with nothing in it: Dictionary should have at least 1 item"),
        ("gate: {confidence: 0.9}", "gate.yaml: `checks` is missing"),
        ("checks: {a: {at_least: 1}}", "`checks.a.metric` is missing"),
        ("checks: {a: {metric: pass@1}}", "sets no bound: set at_least"),
        ("checks: {a: {metric: pass@1, at_least: 2, at_most: 1}}", "at_least 2 is above at_most 1"),
        ("checks: {a: {metric: pass@1, at_least: 0.1, relative: true}}", "relative is for better_by"),
        (
            "checks: {a: {metric: format_rate, at_least: 0.1, patterns: ['(']}}",
            "`checks.a.patterns.0` = '(': not a regular expression",
        ),
        ("checks: {a: {metric: pass@1, atleast: 0.1}}", "did you mean `checks.a.at_least`"),
        (
            "checks: {a: {metric: cost_per_answer, worse_by_at_most: 0.1, relative: true}}",
            "gate.yaml: checks.a.worse_by_at_most is 0.1, and the cost of equal evaluations may differ by 0.15 of "
            "itself",
        ),
        (
            "checks: {a: {metric: truncation_rate, at_most: 5}}",
            "at_most is 5, and truncation_rate is a share between 0 and 1",
        ),
        ("checks: {a: {metric: pass@1, at_least: -1}}", "at_least is -1, and pass@1 is a share between 0 and 1"),
        ("checks: {a: {metric: pass@1, worse_by_at_most: 2}}", "worse_by_at_most is 2, and pass@1 is a share"),
        (
            "gate: {max_problems: 20}\nchecks: {a: {metric: pass@1, at_least: 0.1}}",
            "`gate`: max_problems 20 is below min_problems 30",
        ),
        ("checks: {a: 3}", "must be a map of settings"),
        ("checks: [", "not valid YAML"),
    ],
)
def test_contradictory_gate_files_are_refused_with_their_line(
    folders: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    (folders / "gate.yaml").write_text(text)
    assert main(["gate", "--config", "gate.yaml", "--candidate", "good", "--no-production"]) == 64
    error = capsys.readouterr().err
    assert any(one in error for one in expected.split("|")), error
    assert "gate.yaml" in error


def test_verdict_on_a_single_problem_is_valid_json(folders: Path) -> None:
    write_evaluation(folders / "one", [[1.0]], text=lambda index, reward: "x")
    words = ["--json", "one.json", "checks.accuracy.metric=mean_length_tokens"]
    assert main(["gate", "--config", "gate.yaml", "--candidate", "one", "--production", "one", *words]) == 4

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    report = json.loads((folders / "one.json").read_text(), parse_constant=refuse)
    assert report["rules"][0]["estimate"]["low"] is None
