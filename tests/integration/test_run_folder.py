"""A run is a folder of plain files: metrics by NeMo RL's names, samples, the config, one page to read."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest
from tiny_runs import command, dpo, grpo, questions, results_of, rows_of, run, sft, write_rows

from posttrain.build import TrainingRun
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.config.policy import automatic_schedule
from posttrain.reporting.rows import read_rollouts

STEPS = 4


@pytest.fixture(scope="module")
def folder(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a GRPO run, started as a user starts it, its output in console.txt."""
    folder = tmp_path_factory.mktemp("run")
    ended = subprocess.run(command(grpo(model, data, folder, steps=STEPS)), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (folder / "console.txt").write_text(ended.stdout + ended.stderr)
    return folder


def test_metrics_have_one_object_per_step_with_the_documented_keys(folder: Path) -> None:
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        for key in ("reward", "loss", "kl_penalty", "grad_norm", "mean_generation_length", "unscored"):
            assert isinstance(row[f"train/{key}"], float)
        for key in ("total_step_time", "generation", "reward_calculation", "policy_training"):
            assert row[f"timing/train/{key}"] > 0
        assert row["performance/tokens_per_sec_per_gpu"] > 0
        assert ("validation/accuracy" in row) == (row["step"] % 2 == 0)


def test_rollouts_match_the_metrics(folder: Path) -> None:
    draws = []
    for row in rows_of(folder):
        groups = read_rollouts(folder / "rollouts" / f"step_{row['step']}.jsonl.gz")
        assert len(groups) == 4
        draws += [group["draw"] for group in groups]
        rewards = [completion["reward"] for group in groups for completion in group["completions"]]
        assert row["train/reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-12)
        lengths = [completion["num_tokens"] for group in groups for completion in group["completions"]]
        assert row["train/mean_generation_length"] == pytest.approx(statistics.fmean(lengths))
        for group in groups:
            assert group["prompt"].endswith("<|answer|>")
            assert sum(completion["advantage"] != 0 for completion in group["completions"]) >= 2
    assert draws == list(range(4 * STEPS)), "each prompt of the run has its own number"
    validation = read_rollouts(folder / "rollouts" / "validation_step_2.jsonl.gz")
    assert [group["prompt"] for group in validation] == [f"<|ask|>{row['input']}<|answer|>" for row in questions(3, 1)]


def test_config_is_complete_and_loads_again(folder: Path, model: Path) -> None:
    loaded = load_config("grpo", folder / "config.yaml")
    assert loaded.config.policy.model_name == str(model)
    assert loaded.config.grpo.max_num_steps == STEPS
    assert (folder / f"step_{STEPS}" / "config.yaml").read_text() == (folder / "config.yaml").read_text()


def test_report_is_self_contained(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for word in ("reward", "kl", "length", "grad", "generation"):
        assert word in page.lower()
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert '<figure class="chart' in page
    first = read_rollouts(folder / "rollouts" / "step_1.jsonl.gz")[0]
    assert first["prompt"].removeprefix("<|ask|>").removesuffix("<|answer|>") in page, "sample groups"


def test_log_file_has_plain_text(folder: Path) -> None:
    text = (folder / "console.txt").read_text()
    assert "\x1b" not in text, "no colours in a log file"
    assert "\r" not in text, "no bars that overwrite themselves"
    assert f"Step 1/{STEPS}" in text
    text = (folder / "logs" / "train.log").read_text()
    for part in (f"Step 1/{STEPS}", "Training Results:", "Avg Reward", "Timing:", "Throughputs", "Left for the run"):
        assert part in text
    assert str(folder / "report.html") in text


def test_quiet_prints_only_the_summary(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dpo(model, data, tmp_path / "run", steps=2)) == 0
    captured = capsys.readouterr()
    assert "Step 1/2" not in captured.out
    assert "finished" in captured.out
    assert captured.err == ""


def test_supervised_runs_write_the_same_files(model: Path, data: Path, tmp_path: Path) -> None:
    for name, arguments, keys in (
        ("dpo", dpo(model, data, tmp_path / "dpo", steps=2), ("loss", "preference_loss", "accuracy", "grad_norm")),
        ("sft", sft(model, data, tmp_path / "sft", steps=2), ("loss", "grad_norm", "lr")),
    ):
        assert run(arguments) == 0
        rows = rows_of(tmp_path / name)
        assert [row["step"] for row in rows] == [0, 1, 2], "both validate before they start"
        assert "validation/loss" in rows[0]
        assert all(f"train/{key}" in rows[1] for key in keys)
        assert (tmp_path / name / "report.html").is_file()


def test_equal_prompts_form_separate_groups(model: Path, data: Path, tmp_path: Path) -> None:
    """Groups are formed by the identity of a prompt, never by its text."""
    path = write_rows(tmp_path / "same.jsonl", [{"input": "1 + 1 = ?", "output": str(n)} for n in range(8)])
    settings = [f"data.train.data_path={path}", "policy.train_global_batch_size=16"]
    assert run([*grpo(model, data, tmp_path / "run", steps=1), *settings]) == 0
    groups = read_rollouts(tmp_path / "run" / "rollouts" / "step_1.jsonl.gz")
    assert len(groups) == 4
    assert len({group["reference"] for group in groups}) == 4
    texts = {tuple(completion["text"] for completion in group["completions"]) for group in groups}
    assert len(texts) == 4, "and each of them samples answers of its own"


def test_too_long_prompts_are_left_out_and_reported(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*questions(9), *({"input": "9" * 100, "output": "1"} for _ in range(5))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    settings = [f"data.train.data_path={path}", "data.max_input_seq_length=40"]
    assert run([*grpo(model, data, tmp_path / "run", steps=4), *settings]) == 0
    assert "data.train: 5 rows left out: prompt longer than 40 tokens" in capsys.readouterr().out
    for step in range(1, 5):
        for group in read_rollouts(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl.gz"):
            assert "9" * 50 not in group["prompt"]


def test_reward_function_is_found_relative_to_the_working_directory(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    assert run(grpo(model, data, tmp_path / "run", steps=1, reward="rewards.py:odd")) == 0
    assert results_of(tmp_path / "run")[0]["train/unscored"] == 0


def test_parts_of_a_reward_are_kept_and_averaged(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "def f(response):\n    return {'short': float(len(response) < 12), 'odd': sum(ord(c) % 2 for c in response) / "
        "12}\n"
    )
    arguments = grpo(model, data, tmp_path / "run", steps=1, reward=f"{tmp_path / 'parts.py'}:f")
    assert run(arguments) == 0
    (row,) = results_of(tmp_path / "run")
    assert row["train/reward"] == pytest.approx(row["train/reward/short"] + row["train/reward/odd"])
    (group, *_) = read_rollouts(tmp_path / "run" / "rollouts" / "step_1.jsonl.gz")
    assert group["completions"][0]["parts"].keys() == {"short", "odd"}


def test_earlier_run_without_checkpoints_is_archived(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = [*sft(model, data, tmp_path / "run", steps=2), "checkpointing.enabled=false"]
    assert run(arguments) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert run(arguments) == 0
    assert (tmp_path / "run" / "earlier_001" / "metrics.jsonl").read_bytes() == before
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def learning_rate(config: Path) -> float:
    return float(load_config("sft", config).config.policy.optimizer.kwargs["lr"])


def test_finished_run_keeps_the_config_that_it_was_trained_with(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again with another learning rate, again with the same, and at last continued with another."""
    folder, key = tmp_path / "run", "policy.optimizer.kwargs.lr"
    arguments = [*sft(model, data, folder, steps=2), "policy.scheduler=null"]
    assert run([*arguments, f"{key}=1e-2"]) == 0
    before = files_of(folder)
    capsys.readouterr()
    for _ in range(2):
        assert run([*arguments, f"{key}=1e-3"]) == 64
        message = capsys.readouterr().err
        assert f"{key}: 0.01 -> 0.001" in message
        assert "--resume-with-changes" in message
        assert files_of(folder) == before
    assert run([*arguments, f"{key}=1e-2"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert files_of(folder) == before
    assert run([*arguments, f"{key}=1e-3", "--resume-with-changes"]) == 0
    assert files_of(folder) == before, "no step is trained with it"

    longer = [*sft(model, data, folder, steps=4), "policy.scheduler=null", f"{key}=1e-3"]
    assert run(longer) == 64
    assert main([*longer, "--resume-with-changes"]) == 0
    said = capsys.readouterr().out
    assert f"  sft.max_num_steps: 2 -> 4\n  {key}: 0.01 -> 0.001\n" in said
    assert [row["train/lr"] for row in rows_of(folder) if "train/lr" in row] == [1e-2, 1e-2, 1e-3, 1e-3]
    assert (folder / "config.yaml").read_bytes() == before["config.yaml"]
    assert learning_rate(folder / "config_from_step_3.yaml") == learning_rate(folder / "step_4/config.yaml") == 1e-3
    changes = json.loads((folder / "run.json").read_text())["config_changes"]
    assert {"from_step": 3, "key": key, "old": "0.01", "new": "0.001"} in changes
    page = (folder / "report.html").read_text()
    assert f'<td class="n">3</td><td>{key}</td><td>0.01</td><td>0.001</td>' in page
    assert "config_from_step_3.yaml" in page


def test_a_run_that_is_resumed_with_more_steps_keeps_its_warm_up(model: Path, data: Path, tmp_path: Path) -> None:
    folder, key = tmp_path / "run", "policy.scheduler=auto"
    assert run([*sft(model, data, folder, steps=2), key, "lr=1e-2"]) == 0
    assert [row["train/lr"] for row in rows_of(folder) if "train/lr" in row] == [1e-2, 1e-2], "too short for a warm-up"
    assert load_config("sft", folder / "config.yaml").config.policy.scheduler == automatic_schedule(2)
    _, *words = sft(model, data, folder, steps=40)
    longer = TrainingRun(load_config("sft", None, [*words, key, "lr=1e-2"]), quiet=True)
    longer.close(0)
    assert longer.config.policy.scheduler == automatic_schedule(2) != automatic_schedule(40)


def test_default_folders_of_runs_do_not_collide(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = sft(model, data, tmp_path, steps=1)
    arguments = [word for word in given if not word.startswith("checkpointing.checkpoint_dir=")]
    for _ in range(2):
        assert main(arguments) == 0
    assert "results/sft is finished" in capsys.readouterr().out
    assert main([*arguments, "policy.optimizer.kwargs.lr=1e-3"]) == 0
    assert "results/sft-2" in capsys.readouterr().out
    for folder in ("results/sft", "results/sft-2"):
        loaded = load_config("sft", tmp_path / folder / "config.yaml")
        assert loaded.config.checkpointing.checkpoint_dir == folder
        assert len(rows_of(tmp_path / folder)) == 2
