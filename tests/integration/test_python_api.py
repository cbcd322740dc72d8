"""Runs that are started from Python: what they return, what they record, and how they resume."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_runs

import posttrain as pt
from posttrain.errors import InputError

SMALL = {
    "device": "cpu",
    "precision": "float32",
    "max_length": 64,
    "lr": 1e-2,
    "quiet": True,
    "policy.num_threads": 1,
    "checkpointing.save_consolidated": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("model"))


def made_reward(bonus: float) -> Any:
    def odd(completions: list[str], output: list[str], **columns: Any) -> list[float]:
        return [bonus + sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]

    return odd


def start(model: Path, folder: Path, **settings: Any) -> pt.Run:
    return pt.grpo(
        model,
        tiny_runs.questions(12),
        **{"prompts": 4, "generations": 2, "max_new_tokens": 6, "steps": 4, **SMALL, "folder": folder, **settings},
    )


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> pt.Run:
    """Four steps, from rows in memory and a closure with TRL's signature."""
    return start(model, tmp_path_factory.mktemp("runs") / "grpo", reward=made_reward(1.0))


def test_a_run_gives_its_metrics_answers_and_findings(run: pt.Run) -> None:
    assert run.status == "finished"
    assert list(run.metrics.index) == [1, 2, 3, 4]  # of 12 rows, 4 a step: more than an epoch
    assert (run.metrics["train/reward"] >= 1.0).all()
    groups = run.rollouts(1)
    assert [len(group["completions"]) for group in groups] == [2] * 4
    assert groups[0]["completions"][0]["reward"] >= 1.0
    assert run.rollouts() == run.rollouts(4) != groups
    with pytest.raises(InputError, match="no answers of step 9; it has those of steps 1 to 4"):
        run.rollouts(9)
    assert not [finding for finding in run.doctor() if finding.severity == "error"]
    assert "finished, step 4 of 4" in repr(run)
    assert run.report.exists()
    assert "data:image/svg+xml" in run._repr_html_()


def test_the_same_call_finds_the_run_finished_and_another_reward_is_another_run(run: pt.Run, model: Path) -> None:
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert start(model, run.folder, reward=made_reward(1.0)).folder == run.folder
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    with pytest.raises(InputError, match=r"env\.reward\.function") as refused:
        start(model, run.folder, reward=made_reward(2.0))
    assert "resume_with_changes=True" in str(refused.value)
    assert "restart=True" in str(refused.value)


def test_the_command_line_resumes_a_run_that_python_started(run: pt.Run) -> None:
    config = run.folder / "config.yaml"
    arguments = ["grpo", "--config", str(config), "steps=5"]
    assert tiny_runs.run(arguments) == 0
    rows = run.rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["train/reward"] >= 1.0  # the bonus: the function came from the folder


def test_its_newest_checkpoint_answers_and_is_evaluated(
    run: pt.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run.chat("1 + 1 = ?", max_tokens=4, seed=1, temperature=0, device="cpu")
    assert answer == run.chat("1 + 1 = ?", new=True)
    with pytest.raises(InputError, match="--top-p is 3"):
        run.chat("1 + 1 = ?", top_p=3)
    with pytest.raises(InputError, match=r"^--max-model-len is 9999"):
        run.chat("1 + 1 = ?", max_model_len=9999, device="cpu")
    lines = iter(["2 + 2 = ?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with redirect_stdout(io.StringIO()) as shown:
        assert run.chat() is None
    assert shown.getvalue()
    monkeypatch.chdir(tmp_path)
    checkpoint = pt.load_run(run.folder)
    checkpoint.checkpoints = run.folder.resolve()
    found = checkpoint.evaluate(
        tiny_runs.questions(3),
        reward=lambda response, reference_answer: float(reference_answer.isdigit()),
        **{"generation.max_new_tokens": 4, "generation.device": "cpu", "quiet": True},
    )
    assert (found.summary.score, found.summary.counts.problems) == (1.0, 3)
    assert list((tmp_path / "results/eval/inputs").glob("problems-*.jsonl"))


@pytest.mark.parametrize("kind", ["dpo", "sft", "rm"])
def test_the_other_kinds_train_on_datasets(kind: str, model: Path, tmp_path: Path) -> None:
    rows = tiny_runs.questions(8) if kind == "sft" else tiny_runs.preferences(8)
    given = {**SMALL, "steps": 1, "batch_size": 4, "policy.train_micro_batch_size": 2, "folder": tmp_path / kind}
    given[f"{kind}.val_at_end"] = True
    run = getattr(pt, kind)(model, datasets.Dataset.from_list(rows[:6]), validation=rows[6:], **given)
    assert [row["step"] for row in run.rows][-1] == 1
    assert any(key.startswith("validation/") for row in run.rows for key in row)


def test_a_run_without_a_single_reward_is_a_failure_that_holds_the_run(model: Path, tmp_path: Path) -> None:
    def broken(response: str) -> float:
        raise RuntimeError("no service")

    with pytest.raises(
        pt.RunFailed, match=r"not one of the 8 rollouts could be scored.*with --restart .restart=True"
    ) as caught:
        start(model, tmp_path / "failed", reward=broken, steps=1)
    assert caught.value.exit_code == 65
    assert caught.value.run.rollouts(1)[0]["completions"][0]["error"] == "RuntimeError: no service"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(InputError, match="holds no run"):
        pt.load_run(tmp_path / "results")
    with pytest.raises(InputError, match=r"did you mean .*results"):
        pt.load_run(tmp_path / "result")
    assert set(dir(pt)) >= {"grpo", "ppo", "distill", "dpo", "sft", "rm", "evaluate", "load_run"}
    with pytest.raises(AttributeError, match="kto"):
        _ = pt.kto


def test_variants_of_grpo_are_functions_too(model: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"prompts": 2, "generations": 2, "max_new_tokens": 4, "steps": 1, **SMALL}
    rows = tiny_runs.questions(4)
    critic = pt.ppo(model, rows, made_reward(0.0), folder=tmp_path / "ppo", **small)
    assert "train/value_loss" in critic.metrics
    teacher = tiny_runs.save_model(tmp_path / "teacher", seed=7)
    prompts = [{"input": row["input"]} for row in rows]
    taught = pt.distill(model, teacher, prompts, folder=tmp_path / "distill", **small)
    assert taught.metrics["train/divergence"].iloc[0] > 0
