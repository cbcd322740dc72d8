"""`posttrain rewards`: the list of types, and stored samples scored and compared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.config.rewards import REWARD_TYPES

SHARED_DATA = Path(__file__).parents[3].parent / "shared" / "data"


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(["rewards", *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "2+2?", "response": "4", "reference": "4", "reward": 1},
        {"prompt": "2+3?", "response": "5", "reference": "5", "reward": 0},
        {"prompt": "2+4?", "response": "7", "reference": "6", "reward": 0},
        {"prompt": "2+5?", "response": "7", "reference": None, "reward": 1},
        {"prompt": "2+6?", "response": "8", "reference": "8", "reward": None},
    ]
    return write(tmp_path / "samples.jsonl", rows)


# -- list --------------------------------------------------------------------------------------------------------------


def test_list_shows_every_type_with_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list")
    assert code == 0
    for name, section in REWARD_TYPES.items():
        assert f"\n{name}\n" in f"\n{out}"
        for key, info in section.model_fields.items():
            assert (info.alias or key) in out


def test_list_as_json_and_of_one_type(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "regex", "--json")
    assert code == 0
    listed = json.loads(out)
    assert set(listed) == {"regex"}
    assert listed["regex"]["pattern"]["required"] is True
    assert listed["regex"]["match"]["default"] == "search"
    assert call(capsys, "list", "no_such_type")[0] == 64


# -- test --------------------------------------------------------------------------------------------------------------


def test_agreement_disagreement_and_unscored_samples_are_shown(
    samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "test", "--type", "exact", samples)
    assert code == 0
    assert "5 samples scored" in out
    assert "agree 2 of 4 (50.00%), disagree 1, unscored 1" in out
    assert "1 samples have no recorded reward" in out
    assert f"{samples}, row 2: reward 1, recorded 0" in out
    assert "1 × the task has no reference answer" in out
    table = [line.split() for line in out.splitlines() if line.startswith(("reward 0 ", "reward 1 ", "unscored "))]
    assert table[:3] == [["reward", "0", "1", "0"], ["reward", "1", "1", "1"], ["unscored", "0", "1"]]


def test_samples_without_an_expected_answer_are_named_as_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"input": "2+2?", "output": "4"}, {"input": "2+3?", "output": "5"}])
    assert "name its column with --reference" in call(capsys, "test", "--type", "math", path)[1]


def test_strict_ends_with_2_when_something_disagrees_or_cannot_be_scored(
    tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "test", "--type", "exact", samples, "--strict")[0] == 2
    good = write(tmp_path / "good.jsonl", [{"response": "4", "reference": "4", "reward": 1.0}])
    assert call(capsys, "test", "--type", "exact", good, "--strict")[0] == 0
    no_reference = write(tmp_path / "none.jsonl", [{"response": "4", "reward": 1.0}])
    assert call(capsys, "test", "--type", "exact", no_reference, "--strict")[0] == 2
    assert call(capsys, "test", "--type", "exact", no_reference)[0] == 0
    close = write(tmp_path / "close.jsonl", [{"response": "4", "reference": "4", "reward": 0.9}])
    assert call(capsys, "test", "--type", "exact", close, "--strict")[0] == 2
    assert call(capsys, "test", "--type", "exact", close, "--strict", "--tolerance", "0.2")[0] == 0


def test_columns_and_settings_follow_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"said": "PARIS", "gold": "Paris", "ok": True}, {"said": "Rome", "gold": "Paris", "ok": False}]
    file = write(tmp_path / "columns.jsonl.gz", rows)
    words = ["test", "--type", "exact", file, "--response", "said", "--reference", "gold", "--expected", "ok"]
    assert call(capsys, *words, "--strict")[0] == 2
    assert call(capsys, *words, "--strict", "ignore_case=true")[0] == 0
    code, _, error = call(capsys, *words, "ignore_cases=true")
    assert code == 64
    assert "did you mean 'ignore_case'" in error
    code, _, error = call(capsys, "test", "--type", "exact", file, "--response", "answer")
    assert code == 64
    assert "no key 'answer'" in error
    assert "--response" in error


def test_text_settings_are_not_parsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "texts.jsonl", [{"response": "abc", "reward": 1}, {"response": "123", "reward": 0}])
    code, out, _ = call(capsys, "test", "--type", "regex", file, "pattern=[a-z]", "--strict")
    assert code == 0, out


def test_rows_may_have_their_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": "PARIS", "reference": "Paris", "reward": 1, "ignore_case": True},
        {"response": "PARIS", "reference": "Paris", "reward": 0, "ignore_case": False},
    ]
    file = write(tmp_path / "own.jsonl", rows)
    code, out, _ = call(capsys, "test", "--type", "exact", file, "--row-settings", "ignore_case", "--strict")
    assert code == 0, out


def test_an_environment_of_a_config_its_parts_and_the_scores_as_a_file(
    tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "grpo: {num_prompts_per_step: 2}\n"
        "env:\n  sums:\n    rewards:\n"
        "      right: {type: exact}\n      brief: {type: length, limit: 1, unit: words, weight: 0.5}\n"
        "data: {default: {env_name: sums}}\n"
    )
    words = ["test", "--config", config, "--env", "sums", samples]
    code, out, _ = call(capsys, *words, "--out", tmp_path / "scores.jsonl", "--part", "right")
    assert code == 0
    assert "right: mean 0.75 over 4" in out
    assert "brief: mean 1 over 5" in out
    assert "agree 2 of 4" in out
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert scores[0]["reward"] == 1.5
    assert scores[0]["parts"] == {"right": 1.0, "brief": 1.0}
    assert scores[3]["error"] == "right: the task has no reference answer"
    assert scores[3]["parts"] == {"brief": 1.0}
    code, out, _ = call(capsys, *words, "env.sums.rewards.brief.weight=0")
    assert "reward: mean 0.75" in out
    assert call(capsys, *words, "--part", "left")[0] == 64
    code, _, error = call(capsys, "test", "--config", config, "--env", "other", samples)
    assert code == 64
    assert "sums" in error


def test_rollouts_and_traces_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completions = [{"text": "4", "reward": 1.0, "finish_reason": "stop"}, {"text": "5", "reward": None}]
    rollouts = write(tmp_path / "step_1.jsonl.gz", [{"prompt": "2+2?", "reference": "4", "completions": completions}])
    code, out, _ = call(capsys, "test", "--type", "exact", rollouts, "--strict")
    assert code == 0
    assert "2 samples scored" in out
    assert "agree 1 of 1" in out
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    trace = {"messages": messages, "prompt_len": 1, "reference_answer": "4", "final_reward": 1.0}
    traces = write(tmp_path / "traces.jsonl", [trace])
    code, out, _ = call(capsys, "test", "--type", "exact", traces, "--strict")
    assert code == 0
    assert "agree 1 of 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["samples.jsonl"], "give what scores"),
        (["--type", "exact", "--config", "x.yaml", "samples.jsonl"], "give what scores"),
        (["--type", "exact"], "name the file with the samples"),
        (["--type", "exakt", "samples.jsonl"], "unknown type of reward 'exakt' (did you mean 'exact'?)"),
        (["--type", "exact", "absent.jsonl"], "not found: absent.jsonl"),
        (["--type", "regex", "samples.jsonl"], "env.regex.pattern is missing"),
        (["--type", "regex", "samples.jsonl", "pattern=("], "not a regular expression"),
        (["--type", "json_schema", "samples.jsonl", "schema={type: 3}"], "not a JSON schema"),
        (["--type", "exact", "bad.jsonl"], "the recorded reward is 'high'"),
    ],
)
def test_impossible_requests_exit_64(
    arguments: list[str],
    message: str,
    samples: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(samples.parent)
    write(samples.parent / "bad.jsonl", [{"response": "4", "reference": "4", "reward": "high"}])
    code, _, error = call(capsys, "test", *arguments)
    assert code == 64
    assert message in error


def test_recorded_rewards_of_real_solutions_agree_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    file = SHARED_DATA / "traces" / "gsm8k_model_solutions.jsonl.gz"
    if not file.exists():
        pytest.skip("the shared data file traces/gsm8k_model_solutions.jsonl.gz is not here")
    words = ["test", "--type", "exact", file, r"extract=A:\s*\$?([-\d,.]*\d)", "--strict"]
    code, out, _ = call(capsys, *words, "ignore_punctuation=true")
    assert "agree 4220 of 4220" in out
    assert code == 0
    code, out, _ = call(capsys, *words)  # some write 3,000
    assert "agree 4218 of 4220" in out
    assert code == 2
