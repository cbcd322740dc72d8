"""`posttrain ppo` as a user runs it: it learns, its critic is in the checkpoint, and what is refused."""

import random
import statistics
from pathlib import Path

import pytest
import yaml
from tiny_runs import common, results_of, run, run_as_printed, save_model, write_rows

SETTINGS = [
    "grpo.max_num_epochs=100",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=2",
    "policy.train_global_batch_size=16",
    "policy.generation.max_new_tokens=8",
    "policy.optimizer.kwargs.lr=5e-3",
    "value.optimizer.kwargs.lr=1e-2",
    "policy.scheduler=null",
    "loss_fn.reference_policy_kl_penalty=0",
]


def arguments(model: Path, data: Path, folder: Path, *extra: str, steps: int = 2) -> list[str]:
    files = [f"data={data / 'questions.jsonl'}", f"reward={data / 'rewards.py'}:odd"]
    return ["ppo", *common(model, folder), f"grpo.max_num_steps={steps}", *SETTINGS, *files, *extra]


def test_a_policy_and_its_critic_learn(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(arguments(model, data, tmp_path / "run", steps=20)) == 0
    rows = [row for row in results_of(tmp_path / "run") if "train/reward" in row]
    rewards, losses = ([row[f"train/{name}"] for row in rows] for name in ("reward", "value_loss"))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
    assert rows[-1]["train/critic_lr"] == 0.01
    critic = tmp_path / "run" / "step_20" / "critic"
    assert (critic / "weights" / "model" / "model.safetensors").exists()
    assert (critic / "optimizer" / "optim" / ".metadata").exists()


def test_a_critic_explains_a_reward_that_the_prompt_foretells(model: Path, tmp_path: Path) -> None:
    """The policy stays as it is. The first digit of the prompt decides, so the best value is known from the start of an
    answer, and all of the variance can be explained. No prompt comes twice.
    """
    numbers = random.Random(0).sample([(a, b) for a in range(10, 50) for b in range(10, 50)], 30 * 16)
    rows = [{"input": f"{a} + {b} = ?", "output": str(int(a >= 30))} for a, b in numbers]
    write_rows(tmp_path / "questions.jsonl", rows)
    (tmp_path / "rewards.py").write_text("def foretold(response, reference):\n    return float(reference)\n")
    words = arguments(model, tmp_path, tmp_path / "run", "policy.optimizer.kwargs.lr=0", steps=30)
    words += ["grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=1", "policy.generation.max_new_tokens=4"]
    assert run([*words, f"reward={tmp_path / 'rewards.py'}:foretold"]) == 0
    explained = [row["train/value_explained_variance"] for row in results_of(tmp_path / "run")]
    assert abs(explained[0]) < 0.05, "a new critic says 0 everywhere"
    assert statistics.fmean(explained[-8:]) > 0.7


def test_a_critic_is_saved_in_the_background(model: Path, data: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("true", "false"):
        words = arguments(model, data, tmp_path / name, "checkpointing.save_period=1", steps=3)
        assert run([*words, f"checkpointing.async_save={name}"]) == 0
        files = (tmp_path / name / "step_2" / "critic").rglob("*.safetensors")
        found[name] = [file.read_bytes() for file in files]
    assert found["true"] == found["false"] != []


@pytest.mark.ray
@pytest.mark.full
def test_a_checkpoint_of_two_ranks_goes_on_in_one(model: Path, data: Path, tmp_path: Path) -> None:
    two = ["cluster.launcher=ray", "cluster.gpus_per_node=2"]
    assert run([*arguments(model, data, tmp_path / "run"), *two]) == 0
    assert run(arguments(model, data, tmp_path / "run", steps=4)) == 0
    assert run(arguments(model, data, tmp_path / "one", steps=4)) == 0
    for ours, whole in zip(results_of(tmp_path / "run"), results_of(tmp_path / "one"), strict=True):
        for name in ("train/value_loss", "train/loss", "train/value_mean"):
            assert ours[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5)


def test_recorded_answers_and_the_names_of_the_guide(model: Path, data: Path, tmp_path: Path) -> None:
    words = [
        *common(model, tmp_path / "run"),
        f"data.train={{dataset_name: TraceGroups, data_path: {data / 'traces.jsonl'}}}",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=2",
    ]
    names = ["num_iterations=2", "batch_size=8", "learning_rate=1e-3", "kl_coeff=0.1", "cliprange=0.3", "vf_coeff=0.5"]
    assert run(["ppo", *words, *names]) == 0
    assert len([row for row in results_of(tmp_path / "run") if "train/value_loss" in row]) == 2
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["value_loss_fn"]["scale"] == 0.5
    assert (config["loss_fn"]["ratio_clip_min"], config["loss_fn"]["ratio_clip_max"]) == (0.3, 0.3)
    assert config["loss_fn"]["reference_policy_kl_penalty"] == 0.1


def test_what_a_critic_cannot_be_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for named, extra in (
        ("grpo.adv_estimator.name", ["grpo.adv_estimator.name=rloo"]),
        ("value.model_name", ["value.model_name=nowhere/at-all"]),
        ("whiten_advantages", ["grpo.adv_estimator.whiten_advantages=rollouts"]),
        ("kl_in_reward", ["grpo.adv_estimator.kl_in_reward=sequence"]),
        ("value_loss_fn.scale", ["value_loss_fn.scale=0"]),
    ):
        assert run(arguments(model, data, tmp_path / "run", *extra)) == 64
        assert named in capsys.readouterr().err


def test_a_run_without_a_critic_is_not_continued_with_one(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(model, data, tmp_path / "run")[1:]
    assert run(["grpo", *words]) == 0
    assert "value: only PPO has a critic" in capsys.readouterr().err
    assert run(["ppo", *words, "grpo.max_num_steps=3", "--resume-with-changes"]) == 64
    assert "holds no critic" in capsys.readouterr().err


def test_another_model_can_be_the_critic(model: Path, data: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", hidden_size=48, seed=7)
    assert run(arguments(model, data, tmp_path / "run", f"value.model_name={other}")) == 0


def test_what_init_prints_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_as_printed("ppo", capsys) == ["ppo"]
    assert len([row for row in results_of(tmp_path / "results/grpo") if "train/value_loss" in row]) == 5
