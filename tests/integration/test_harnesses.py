"""`posttrain eval --harness`: what lm-eval and Inspect measure becomes an evaluation that can be compared and gated."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_server
from harness_stand_in import make_python

from posttrain.apps.evaluate.results import read_evaluation
from posttrain.cli.main import main

REAL = {
    "lm-eval": os.environ.get("POSTTRAIN_LM_EVAL_PYTHON", ""),
    "inspect": os.environ.get("POSTTRAIN_INSPECT_PYTHON", ""),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server.save_model(tmp_path_factory.mktemp("harness") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with tiny_server.running(tiny_server.options_for(model)) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def python(tmp_path: Path) -> str:
    return make_python(tmp_path / "packages")


def words(model: str, name: str, python: str, folder: Path, *more: str) -> list[str]:
    return ["eval", model, "--harness", name, "--harness-python", python, f"eval.save_path={folder}", "--quiet", *more]


GATE = """
gate: {min_problems: 1}
checks:
  accuracy: {metric: avg@1, worse_by_at_most: 1.0}
"""


def test_results_of_lm_eval_are_compared_and_gated(
    url: str, python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert main(words(url, "lm-eval", python, one, "--tasks", "sums,more")) == 0
    assert main(words(url, "lm-eval", python, other, "--tasks", "sums", "generation.max_new_tokens=5")) == 0
    found = read_evaluation(one / "sums")
    assert [problem.id for problem in found.problems] == ["sums/0", "sums/1", "sums/2"]
    assert found.problems[0].prompt == "2 + 2"
    assert found.summary.dataset == "lm-eval/sums"
    for problem in found.problems:
        (sample,) = problem.samples
        assert sample.reward == len(sample.text) % 2
        assert sample.parts == {
            "exact_match,strict": sample.reward,
            "exact_match,loose": 1.0,
            "kinds,strict": 0.5,
            "kinds,loose": 0.5,
        }
        assert (sample.answer, sample.num_tokens, sample.finish_reason) == (sample.text[:3], None, None)
    assert set(found.summary.intervals) == {"pass@1", "avg@1", "unscored_rate"}
    assert read_evaluation(one / "more").summary.dataset == "lm-eval/more"
    capsys.readouterr()
    assert main(["eval", "compare", str(one / "sums"), str(other)]) == 0
    assert "lm-eval/sums, 3 problems, pass@1" in capsys.readouterr().out
    (tmp_path / "gate.yaml").write_text(GATE)
    gate = ["gate", "--config", str(tmp_path / "gate.yaml"), "--candidate", str(other), "--production"]
    assert main([*gate, str(one / "sums")]) in (0, 3, 4)
    assert "avg@1" in capsys.readouterr().out
    main(words(url, "lm-eval", python, tmp_path / "loose", "--tasks", "sums", "--harness-metric", "exact_match,loose"))
    assert read_evaluation(tmp_path / "loose").summary.score == 1.0
    capsys.readouterr()
    assert main(["eval", "compare", str(one / "sums"), str(tmp_path / "loose")]) == 64
    assert "scored by different judges: env.metric" in capsys.readouterr().err


def test_results_of_inspect_keep_epochs_letters_and_errors(url: str, python: str, tmp_path: Path) -> None:
    more = ("--tasks", "sums.py", "eval.num_tests_per_prompt=2", "generation.temperature=1")
    assert main(words(url, "inspect", python, tmp_path / "e", *more)) == 0
    found = read_evaluation(tmp_path / "e")
    assert [len(problem.samples) for problem in found.problems] == [2, 2, 2]
    for problem in found.problems[:2]:
        for sample in problem.samples:
            assert sample.reward == {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}["CIPN"[len(sample.text) % 4]]
            assert sample.parts == {"includes": sample.reward, "graded/style": 0.5}
            assert (sample.num_tokens, sample.finish_reason, sample.answer) == (8, "length", sample.text[:2])
    assert [sample.error for sample in found.problems[2].samples] == ["inspect: the tool broke"] * 2
    assert found.summary.counts.unscored == 2  # not zero
    assert found.summary.num_tests_per_prompt == 2


def test_a_finished_evaluation_is_not_repeated_and_another_one_refused(
    url: str, python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(url, "lm-eval", python, tmp_path / "e", "--tasks", "sums")) == 0
    before = (tmp_path / "e" / "problems.jsonl").read_bytes()
    (tmp_path / "packages" / "lm_eval" / "__main__.py").write_text("raise SystemExit(3)")
    assert main(words(url, "lm-eval", python, tmp_path / "e", "--tasks", "sums")) == 0
    assert (tmp_path / "e" / "problems.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(words(url, "lm-eval", python, tmp_path / "e", "--tasks", "sums", "eval.seed=7")) == 64
    assert "holds another evaluation: seed was 42 and is 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--tasks", "missing"], "lm-eval ended with exit code 1: Tasks not found: missing"),
        ([], "--harness lm-eval needs --tasks"),
        (["--tasks", "sums", "data.dataset_name=gsm8k"], "data.dataset_name has no effect with --harness lm-eval"),
        (["--tasks", "sums", "--harness-python", "/missing/python"], "-m venv .lm-eval-venv && .lm-eval-venv/bin/pip"),
        (["--tasks", "sums", "--harness-metric", "f1"], "--harness-metric f1: sums has exact_match,strict,"),
        (["--tasks", "sums", "--harness-args", "'"], "--harness-args"),
        (["--tasks", "sums", "--retry-unscored"], "--retry-unscored"),
        (["--tasks", "sums", "eval.num_tests_per_prompt=2", "generation.temperature=1"], "`repeats`"),
    ],
)
def test_bad_input_is_refused_with_its_name(
    more: list[str], problem: str, url: str, python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(url, "lm-eval", python, tmp_path / "e", *more)) == 64
    assert problem in " ".join(capsys.readouterr().err.split())


def test_options_of_a_harness_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "model", "--tasks", "gsm8k"]) == 64
    assert "--tasks needs --harness" in capsys.readouterr().err


@pytest.mark.full
def test_weights_are_served_for_the_time_of_the_evaluation(model: Path, python: str, tmp_path: Path) -> None:
    more = ("--tasks", "sums", "generation.device=cpu", "generation.num_threads=1")
    assert main(words(str(model), "lm-eval", python, tmp_path / "e", *more)) == 0
    found = read_evaluation(tmp_path / "e")
    assert found.summary.model_fingerprint is not None
    assert len(found.problems) == 3
    key = json.loads((tmp_path / "e" / "harness.json").read_text())
    assert "POSTTRAIN_API_KEY" not in json.dumps(key)


# -- the real packages -------------------------------------------------------------------------------------------------

GSM8K = """
task: gsm8k_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/gsm8k.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:"], temperature: 0.0, max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - {{name: strict-match, filter: [{{function: regex, regex_pattern: "#### (-?[0-9.,]+)"}}, {{function: take_first}}]}}
  - {{name: flexible-extract, filter: [{{function: regex, regex_pattern: "(-?[0-9]+)"}}, {{function: take_first}}]}}
"""
IFEVAL = """
include: {package}/tasks/ifeval/ifeval.yaml
task: ifeval_local
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {folder}/ifeval.jsonl}}}}
"""


@pytest.mark.full
@pytest.mark.skipif(not REAL["lm-eval"], reason="POSTTRAIN_LM_EVAL_PYTHON names no Python with lm-eval")
def test_gsm8k_and_ifeval_of_lm_eval_on_local_data(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (package,) = Path(REAL["lm-eval"]).parents[1].glob("lib/python3*/site-packages/lm_eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in (("gsm8k", GSM8K), ("ifeval", IFEVAL)):
        (tasks / f"{name}_local.yaml").write_text(text.format(folder=tmp_path, package=package))
    sums = [{"question": f"{a} + 2?", "answer": f"{a} + 2 = {a + 2}\n#### {a + 2}"} for a in range(4)]
    rules = ["punctuation:no_comma", "change_case:english_lowercase"]
    asked = [{"key": k, "prompt": rule, "instruction_id_list": [rule], "kwargs": [{}]} for k, rule in enumerate(rules)]
    for name, rows in (("gsm8k", sums), ("ifeval", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--tasks", "gsm8k_local,ifeval_local", "--harness-args", f"--include_path {tasks}")
    more += ("generation.max_new_tokens=16",)
    assert main(words(url, "lm-eval", REAL["lm-eval"], tmp_path / "e", *more)) == 0
    gsm8k, ifeval = (read_evaluation(tmp_path / "e" / name) for name in ("gsm8k_local", "ifeval_local"))
    assert gsm8k.summary.counts.problems == 4
    assert set(gsm8k.problems[0].samples[0].parts) == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert ifeval.summary.counts.problems == 2
    assert all(sample.reward in (0.0, 1.0) for problem in ifeval.problems for sample in problem.samples)
    assert main(["eval", "compare", str(tmp_path / "e" / "ifeval_local"), str(tmp_path / "e" / "ifeval_local")]) == 0


INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def letters():
    rows = [Sample(input=f"Say {c}.", target=c, id=f"letter-{c}") for c in "abc"]
    return Task(dataset=MemoryDataset(rows), solver=generate(), scorer=includes())
"""


@pytest.mark.full
@pytest.mark.skipif(not REAL["inspect"], reason="POSTTRAIN_INSPECT_PYTHON names no Python with inspect-ai")
def test_a_task_of_inspect(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(INSPECT)
    more = ("--tasks", str(tmp_path / "letters.py"), "generation.max_new_tokens=6")
    assert main(words(url, "inspect", REAL["inspect"], tmp_path / "e", *more)) == 0
    found = read_evaluation(tmp_path / "e")
    assert [problem.id for problem in found.problems] == ["letters/letter-a", "letters/letter-b", "letters/letter-c"]
    assert all(0 < (sample.num_tokens or 0) <= 6 for problem in found.problems for sample in problem.samples)
    assert "length" in {sample.finish_reason for problem in found.problems for sample in problem.samples}
