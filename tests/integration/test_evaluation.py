"""`posttrain eval` as a user runs it: the numbers, the block, killing and going on, comparing, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import tiny_runs
import torch
from hub_layouts import LAYOUTS, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.apps.evaluate.results import read_evaluation
from posttrain.cli.main import main
from posttrain.data.chat import ChatFormat

NUM_PROBLEMS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"problem": row["input"], "answer": row["output"]} for row in tiny_runs.questions(NUM_PROBLEMS)]
    tiny_runs.write_rows(folder / "sums.jsonl", rows)
    (folder / "rewards.py").write_text(tiny_runs.ODD_CHARACTERS)
    return folder


def arguments(model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    judge = f"env.mine.function={data / 'rewards.py:odd'}"
    return tiny_runs.evaluation(model, data / "sums.jsonl", folder, judge, "eval.pass_threshold=0.5", *more)


SAMPLED = ("eval.num_tests_per_prompt=3", "generation.temperature=1", "generation.num_prompts_per_step=1")
SAMPLED += ("eval.metric=cons@k",)


@pytest.mark.invariant
def test_greedy_answers_are_those_of_transformers(model: Path, data: Path, tmp_path: Path) -> None:
    assert main(arguments(model, data, tmp_path / "e", "--quiet")) == 0
    found = read_evaluation(tmp_path / "e")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = ChatFormat(tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for problem in found.problems:
        text = chat.render([{"role": "user", "content": problem.prompt}])
        ids = chat.encode_prompts([text])[0]
        new = plain.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(chat.stop_token_ids),
            pad_token_id=tokenizer.pad_token_id,
        )[0, len(ids) :]
        assert problem.samples[0].text == tokenizer.decode(new, skip_special_tokens=True)
        assert problem.samples[0].num_tokens == len(new)
        odd = sum(ord(c) % 2 for c in problem.samples[0].text) / max(1, len(problem.samples[0].text))
        assert problem.rewards == [odd]


def test_the_block_is_the_one_that_users_know(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "e"
    words = arguments(model, data, folder, *SAMPLED, "generation.num_prompts_per_step=-1", "--gpu-hour-price", "3.6")
    words[words.index("eval.metric=cons@k")] = "eval.metric=pass@k"
    assert main(words) == 0
    shown = capsys.readouterr()
    summary = read_evaluation(folder).summary
    total = sum(
        sum(reward >= 0.5 for reward in problem.rewards if reward is not None) / 3
        for problem in read_evaluation(folder).problems
    )
    lines = shown.out.splitlines()
    assert lines[1] == lines[6] == "=" * 60
    assert lines[2] == f"model_name='{model}' dataset_name='{data / 'sums.jsonl'}'"
    assert lines[3] == "max_new_tokens=12 temperature=1.0 top_p=1.0 top_k=-1 seed=42"
    assert lines[4] == "metric=pass@1 num_tests_per_prompt=3"
    assert lines[5].startswith(f"score={total / 12:.4f} (")
    assert lines[5].endswith("/12)")
    assert float(lines[5].partition("(")[2].partition("/")[0]) == pytest.approx(total)
    for word in ("pass@3", "cons@3", "avg@3", "length", "truncated", "unscored", "tokens/s", "cost", str(folder)):
        assert word in shown.out
    assert summary.counts.samples == 36
    assert summary.cost == pytest.approx(summary.wall_s * 3.6 / 3600)
    assert summary.intervals["pass@1"].low <= summary.metrics["pass@1"] <= summary.intervals["pass@1"].high

    # Another metric of a finished evaluation is summed up anew; no model is needed for that.
    words[words.index("eval.metric=pass@k")] = "eval.metric=avg@k"
    before = (folder / "problems.jsonl").read_bytes()
    assert main([*words, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "avg@1"
    assert (folder / "problems.jsonl").read_bytes() == before


def test_killed_at_any_moment_it_goes_on_and_gives_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    assert main([*arguments(model, data, tmp_path / "whole", *SAMPLED), "--quiet"]) == 0
    words = arguments(model, data, tmp_path / "cut", *SAMPLED)
    rows = tmp_path / "cut" / "problems.jsonl"
    for number, least in enumerate((1, 5)):
        process = tiny_runs.start(words, tmp_path / f"log{number}")
        assert tiny_runs.wait_until(
            lambda least=least: rows.exists() and rows.read_bytes().count(b"\n") >= least, process
        )
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not (tmp_path / "cut" / "summary.json").exists()
    assert main([*words, "--quiet"]) == 0
    whole, cut = (read_evaluation(tmp_path / name) for name in ("whole", "cut"))
    assert cut.problems == whole.problems
    assert (cut.summary.metrics, cut.summary.intervals) == (whole.summary.metrics, whole.summary.intervals)
    assert rows.read_bytes().count(b"\n") == NUM_PROBLEMS, "no problem was done twice"


def test_two_evaluations_are_compared_on_the_command_line(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_runs.save_model(tmp_path / "other", seed=5)
    for name, which in (("a", model), ("b", other)):
        assert main([*arguments(which, data, tmp_path / name), "--quiet"]) == 0
    capsys.readouterr()
    page = tmp_path / "pages" / "compare.html"
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["eval", "compare", *both, "--metric", "avg@1", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "sign-flip permutation" in shown
    assert "12 problems, avg@1" in shown
    assert page.read_text().startswith("<!doctype html>")
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path)]) == 64
    assert not list(tmp_path.parent.glob("*.partial"))
    assert main(["eval", "compare", str(tmp_path / "a")]) == 64
    fewer = arguments(model, data, tmp_path / "fewer", "eval.max_problems=4")
    assert main([*fewer, "--quiet"]) == 0
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "fewer")]) == 64
    assert "8 only in A" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.dataset_name=aime24x", "did you mean 'aime24'"),
        ("data.dataset_name={broken}", "broken.jsonl, row 2: the expected answer is empty"),
        ("data.solution_key=anser", "row 1: no key 'anser' (did you mean 'answer'?)"),
        ("generation.model_name=no/where/at/all", "no folder 'no/where/at/all'"),
        ("env.mine.function=nowhere.py:f", "nowhere.py"),
        ("generation.backend=vllm", "pip install 'posttrain[vllm]'"),
        ("generation.vllm_cfg.max_model_len=8", "raise generation.vllm_cfg.max_model_len"),
        ("generation.model_name=http://127.0.0.1:9/v1", "is the server there?"),
    ],
)
def test_bad_input_is_named_and_exits_with_64(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    broken = tiny_runs.write_rows(
        tmp_path / "broken.jsonl", [{"problem": "1?", "answer": "1"}, {"problem": "2?", "answer": ""}]
    )
    words = arguments(model, data, tmp_path / "e", change.replace("{broken}", str(broken)))
    if change.startswith("generation.model_name"):
        words.remove(str(model))
    assert main(words) == 64
    assert said in capsys.readouterr().err
    assert not (tmp_path / "e" / "problems.jsonl").exists()


def test_a_folder_of_another_evaluation_is_not_mixed_with_this_one(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(model, data, tmp_path / "e"), "--quiet"]) == 0
    assert main([*arguments(model, data, tmp_path / "e", "generation.temperature=0.5"), "--quiet"]) == 64
    assert "sampling.temperature was 0.0 and is 0.5" in capsys.readouterr().err


def test_a_judge_whose_file_was_edited_is_another_judge(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "rewards.py"
    reward.write_text(tiny_runs.ODD_CHARACTERS)
    command = arguments(
        model, data, tmp_path / "e", "--quiet", f"env.mine.function={reward}:odd", "eval.max_problems=2"
    )
    assert main(command) == 0
    assert main(command) == 0
    reward.write_text(tiny_runs.ODD_CHARACTERS.replace("return", "return 1 -"))
    assert main(command) == 64, "scores of the old judge must not be shown for the new one"
    assert "holds another evaluation: judge." in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_bad_input(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    broken.model.norm.weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "broken")
    assert main(arguments(tmp_path / "broken", data, tmp_path / "e", "--quiet")) == 64
    assert "the model cannot be evaluated" in capsys.readouterr().err
    assert not (tmp_path / "e" / "summary.json").exists()


def test_failing_judge_is_reported_with_its_reason(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def f(prompt, response, reference):\n    return 1.0 * {}\n")
    words = arguments(model, data, tmp_path / "e", "--quiet", f"env.mine.function={rewards}:f")
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "score=none (no sample was scored)" in shown
    assert re.search(r"\d+ times: .*TypeError: unsupported operand type", shown)
    assert main([*words, "--json"]) == 1, "also for whoever reads the JSON"


@pytest.mark.parametrize("name", ["AIME2024", "AIME2025", "AMC23", "MATH-500", "mmlu", "gpqa", "DeepScaleR"])
def test_a_benchmark_from_local_files_takes_one_command(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files, count, _ = LAYOUTS[name]
    judge = (
        [] if name in ("mmlu", "gpqa") else [f"env.mine.function={data / 'rewards.py:odd'}", "env.mine.num_workers=1"]
    )
    command = [
        *("eval", str(model), f"data.dataset_name={name}", f"data.data_path={save(tmp_path / 'data', files)}", *judge),
        *("generation.device=cpu", "generation.max_new_tokens=8", "generation.vllm_cfg.max_model_len=400"),
        *(f"eval.save_path={tmp_path / 'e'}", "eval.bootstrap_resamples=10", "--quiet"),
    ]
    assert main(command) == 0
    assert f"dataset_name='{name}'" in capsys.readouterr().out
    summary = read_evaluation(tmp_path / "e").summary
    assert (summary.counts.samples, summary.metrics["unscored_rate"]) == (count, 0.0)
