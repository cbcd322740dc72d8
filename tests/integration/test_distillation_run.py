"""`posttrain distill` as a user runs it: prompts and a teacher, and what is refused."""

import json
from pathlib import Path

import pytest
from tiny_runs import common, results_of, run, run_as_printed, save_model, save_reward_model
from transformers import PreTrainedTokenizerFast

from posttrain.errors import ExitCode

SETTINGS = [
    "grpo.max_num_steps=10",
    "grpo.max_num_epochs=100",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.generation.max_new_tokens=12",
    "policy.optimizer.kwargs.lr=1e-2",
    "policy.scheduler=null",
]


def arguments(model: Path, folder: Path, prompts: Path, *extra: str) -> list[str]:
    return ["distill", *common(model, folder), *SETTINGS, f"data={prompts}", *extra]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, seed=7)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"input": f"{i} + {i % 7} ="}) for i in range(40)))
    return file


def test_a_student_learns_its_teacher_from_prompts_alone(
    model: Path, teacher: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(model, tmp_path / "run", prompts, f"teacher={teacher}")) == 0
    rows = [row for row in results_of(tmp_path / "run") if "train/divergence" in row]
    assert len(rows) == 10
    assert rows[-1]["train/divergence"] < 0.7 * rows[0]["train/divergence"]
    assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/divergence"])
    assert "nothing is learnt" not in capsys.readouterr().out
    assert not (tmp_path / "run" / "findings.jsonl").exists()


def test_answers_that_could_not_be_scored_are_distilled_unless_rewards_are_trained_on(
    model: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text("def fails(response):\n    raise ValueError('no')\n")
    rewards = [f"teacher={teacher}", f"reward={tmp_path / 'rewards.py'}:fails", "data.default.output_key=''"]
    rewards += ["grpo.max_num_steps=1", "loss_fn.use_kl_in_reward=true"]  # of no reward, if none is trained on
    for weight in ("0", "1"):
        code = run(arguments(model, tmp_path / weight, prompts, *rewards, f"teacher.reward_weight={weight}"))
        assert code == (0 if weight == "0" else ExitCode.NO_PROGRESS)
        [row] = [row for row in results_of(tmp_path / weight) if "train/unscored" in row]
        assert row["train/unscored"] == 16
        assert ("train/divergence" in row) == (weight == "0")


def test_what_cannot_be_distilled_is_refused(
    model: Path, teacher: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model(tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    scores = save_reward_model(model, tmp_path / "scores")
    config = scores / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    for named, extra in (
        ("teacher.model_name is not set", []),
        (f"teacher.model_name: {str(scores)!r} is a reward model", [f"teacher={scores}"]),
        ("another tokenizer", [f"teacher={other}"]),
        ("teacher.model_name", ["teacher=nowhere/at-all"]),
        ("teacher.weight", [f"teacher={teacher}", "teacher.weight=0"]),
        ("teacher.divergence", [f"teacher={teacher}", "teacher.divergence=hellinger"]),
        ("teacher.over = sampled", [f"teacher={teacher}", "teacher.over=sampled", "preset=trl-gmpo"]),
    ):
        assert run(arguments(model, tmp_path / "run", prompts, *extra)) == 64
        assert named in capsys.readouterr().err


def test_what_init_prints_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_as_printed("distill", capsys) == ["sft", "distill"]
    divergences = [row["train/divergence"] for row in results_of(tmp_path / "results/grpo")]
    assert len(divergences) == 5
    assert min(divergences) > 0
