"""Conversations of several turns in whole runs: a small model finds out that asking a calculator pays, and what holds
for every run holds for these: packed is unpacked, two ranks are one process, resumed is uninterrupted.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
from tiny_runs import assert_resumes, assert_same_curves, grpo, rows_of, run, save_data, weights_of

from posttrain.apps.evaluate.results import read_evaluation

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"


def groups_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


# -- the worked example ------------------------------------------------------------------------------------------------


def test_a_model_learns_to_ask_the_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """configs/sft_calculator.yaml and grpo_calculator.yaml as they are, with fewer prompts and steps of GRPO."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    from calculator_task import build_model, write_data

    monkeypatch.chdir(tmp_path)
    folder = Path("results/calculator")
    build_model(folder / "model", seed=1)
    write_data(folder / "data", seed=1)
    assert run(["sft", "--config", str(CONFIGS / "sft_calculator.yaml")]) == 0
    shorter = ["grpo.num_prompts_per_step=16", "policy.train_global_batch_size=128", "grpo.max_num_steps=16"]
    few = ["grpo.max_val_samples=60", "grpo.val_period=0", "checkpointing.enabled=false"]
    assert run(["grpo", "--config", str(CONFIGS / "grpo_calculator.yaml"), *shorter, *few]) == 0

    taught = ["generation.model_name=results/calculator/taught", "eval.max_problems=60", "generation.temperature=1"]
    assert run(["eval", "--config", str(CONFIGS / "eval_calculator.yaml"), *taught, "eval.save_path=asked"]) == 0
    samples = [sample for problem in read_evaluation("asked").problems for sample in problem.samples]
    solved = [sample for sample in samples if sample.reward == 1.0]
    assert 0 < len(solved) < len(samples)
    assert all([turn["role"] for turn in sample.turns] == ["assistant", "tool", "assistant"] for sample in solved)
    assert all(sample.answer == sample.turns[1]["text"] for sample in solved)

    rows = rows_of(folder / "grpo")
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    calls = [row["train/tool_calls"] for row in rows if "train/tool_calls" in row]
    assert accuracy[0] < 0.5, "before, it gives up more often than it asks"
    assert accuracy[-1] > accuracy[0] + 0.3
    assert calls[-1] > calls[0] + 0.3
    assert all(row["train/unscored"] == 0 for row in rows if "train/unscored" in row)

    last = groups_of(folder / "grpo/rollouts/step_16.jsonl.gz")
    best = next(c for group in last for c in group["completions"] if c["reward"] == 1.0)
    assert [turn["role"] for turn in best["turns"]] == ["assistant", "tool", "assistant"]
    assert best["turns"][2]["text"] == f"\\boxed{{{best['turns'][1]['text']}}}"
    assert 'class="turn environment"' in (folder / "grpo/report.html").read_text()


# -- what holds for every run ------------------------------------------------------------------------------------------

TALK = """
from posttrain.environments.turns import Turn, TurnEnvironment

class Talk(TurnEnvironment):
    \"\"\"Goes on for two turns, says back how long the answer was, and likes odd characters.\"\"\"
    def reset(self, task):
        return (0, 0.0)
    def step(self, state, response):
        turn, total = state
        total += sum(ord(c) % 2 for c in response) / max(1, len(response))
        if turn == 2:
            return Turn(reward=total, done=True)
        return Turn((turn + 1, total), f"{len(response)}!", counts={"said": 1})
    def end(self, state, reason):
        return state[1]

class ShortOrLong(Talk):
    \"\"\"Some tasks end after one turn, others after three.\"\"\"
    def reset(self, task):
        return (0 if int(task.reference) % 2 else 2, 0.0)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_data(tmp_path_factory.mktemp("data"))
    (folder / "talk.py").write_text(TALK)
    return folder


def talking(model: Path, data: Path, folder: Path, *settings: str) -> list[str]:
    """A random model over the demo's tokenizer ends a turn after some five tokens: every fourth byte is a stop."""
    arguments = grpo(model, data, folder, steps=4)
    arguments.remove(f"env.mine.function={data / 'rewards.py:odd'}")
    return [
        *arguments,
        f"env.mine.turns={data / 'talk.py'}:Talk",
        "grpo.max_rollout_turns=4",
        "policy.max_total_sequence_length=96",
        f"policy.generation.stop_token_ids={list(range(0, 256, 4))}",
        "cluster.launcher=local",
        *settings,
    ]


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(talking(model, data, folder)) == 0
    return folder


def test_the_run_is_one_of_several_turns_that_trains_the_models_tokens_only(whole: Path) -> None:
    rows = [row for row in rows_of(whole) if "train/turns" in row]
    assert len(rows) == 4
    assert all(1.5 < row["train/turns"] <= 3 for row in rows)
    assert all(row["train/environment_tokens"] > 0 for row in rows)
    assert all("validation/turns" in row for row in rows_of(whole) if "validation/accuracy" in row)
    # Sampler and trainer agree on every trained token: had a token of the environment been among them, they would not.
    assert all(row["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3) for row in rows)
    groups = groups_of(whole / "rollouts/step_1.jsonl.gz")
    said = [turn for group in groups for c in group["completions"] for turn in c["turns"]]
    assert {turn["role"] for turn in said} == {"assistant", "tool"}


@pytest.mark.invariant
def test_a_resumed_run_of_conversations_is_the_uninterrupted_one(
    model: Path, data: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "resumed"
    assert_resumes(lambda folder: talking(model, data, folder), whole, folder, 4)
    for path in sorted((whole / "rollouts").glob("*")):
        assert (folder / "rollouts" / path.name).read_bytes() == path.read_bytes(), path.name


def test_conversations_carried_over_between_steps_resume_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    rounds = [
        f"env.mine.turns={data / 'talk.py'}:ShortOrLong",
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=2",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(talking(model, data, whole, *rounds)) == 0
    assert max(row.get("train/trajectory_age_max", 0) for row in rows_of(whole)) > 0, "conversations are carried over"
    several = [
        c for step in (2, 3, 4) for g in groups_of(whole / f"rollouts/step_{step}.jsonl.gz") for c in g["completions"]
    ]
    assert any(len(completion["versions"]) > 1 for completion in several), "some by two versions of the weights"
    assert_resumes(lambda folder: talking(model, data, folder, *rounds), whole, resumed, 4)


def test_age_0_is_the_synchronous_run_of_conversations(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    rounds = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"]
    assert run(talking(model, data, tmp_path / "run", *rounds)) == 0
    assert weights_of(tmp_path / "run/step_4") == weights_of(whole / "step_4")


def test_packed_conversations_train_like_unpacked_ones(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    for name, settings in {
        "one by one": ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1"],
        "packed": ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=300"],
    }.items():
        assert run(talking(model, data, tmp_path / name, *settings)) == 0
    assert_same_curves(tmp_path / "one by one", tmp_path / "packed", but="packing")
    assert_same_curves(tmp_path / "packed", whole, but="packing")


@pytest.mark.ray
def test_conversations_are_the_same_on_two_ranks_as_in_one_process(
    model: Path, data: Path, whole: Path, tmp_path: Path
) -> None:
    assert run([*talking(model, data, tmp_path / "two"), "cluster.launcher=ray", "cluster.gpus_per_node=2"]) == 0
    assert_same_curves(tmp_path / "two", whole, but="packing")
    ours, theirs = (groups_of(folder / "rollouts/step_1.jsonl.gz") for folder in (tmp_path / "two", whole))
    assert [c["turns"] for g in ours for c in g["completions"]] == [
        c["turns"] for g in theirs for c in g["completions"]
    ]


def test_an_environment_that_fails_now_and_then_leaves_rollouts_unscored_and_the_run_goes_on(
    model: Path, data: Path, tmp_path: Path
) -> None:
    failing = TALK.replace(
        "        turn, total = state\n",
        "        turn, total = state\n        if len(response) % 3 == 0: raise OSError('no line')\n",
    )
    (data / "failing.py").write_text(failing)
    arguments = [
        *talking(model, data, tmp_path / "run"),
        f"env.mine.turns={data / 'failing.py'}:Talk",
        "grpo.max_num_steps=2",
    ]
    assert run(arguments) == 0
    rows = [row for row in rows_of(tmp_path / "run") if "train/unscored" in row]
    assert all(0 < row["train/unscored"] < 16 for row in rows)
    reasons = [json.loads(line) for line in (tmp_path / "run/unscored.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in reasons} == {"OSError: no line"}


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluation(model: Path, data: Path, folder: Path, *settings: str) -> list[str]:
    keys = ["data.problem_key=input", "data.solution_key=output", "eval.max_problems=6", "eval.max_rollout_turns=4"]
    sizes = ["generation.num_prompts_per_step=2", "generation.vllm_cfg.max_model_len=192"]
    return tiny_runs.evaluation(model, data / "questions.jsonl", folder, *keys, *sizes, *settings)


def conversing(model: Path, data: Path, folder: Path) -> list[str]:
    sampled = ["generation.temperature=1", "eval.num_tests_per_prompt=2"]
    stops = f"generation.stop_token_ids={list(range(0, 256, 4))}"
    return evaluation(model, data, folder, f"env.mine.turns={data / 'talk.py'}:Talk", stops, *sampled)


def test_an_evaluation_takes_turns_and_goes_on_after_an_interruption(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(conversing(model, data, tmp_path / "whole")) == 0
    found = read_evaluation(tmp_path / "whole")
    samples = [sample for problem in found.problems for sample in problem.samples]
    assert found.summary.counts.unscored == 0
    roles = [[turn["role"] for turn in sample.turns] for sample in samples]
    assert ["assistant", "tool", "assistant", "tool", "assistant"] in roles
    for sample in samples:
        said = [turn["text"] for turn in sample.turns if turn["role"] == "assistant"]
        heard = [turn["text"] for turn in sample.turns if turn["role"] == "tool"]
        assert heard == [f"{len(text)}!" for text in said[: len(heard)]]
        assert sample.answer == (" ".join(said[-1].split()) or None)

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/summary.json").unlink()
    rows = (tmp_path / "whole/problems.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut/problems.jsonl").write_text("".join(rows[:3]))
    assert run(conversing(model, data, tmp_path / "cut")) == 0
    assert read_evaluation(tmp_path / "cut").problems == found.problems


def test_an_evaluation_puts_the_tools_of_its_environment_into_the_prompt(
    model: Path, data: Path, tmp_path: Path
) -> None:
    calculator = ("env.mine.turns=calculator", "env.mine.type=math")
    longer = "generation.vllm_cfg.max_model_len=1024"
    assert run(evaluation(model, data, tmp_path / "tools", *calculator, longer)) == 0
    plain = (*calculator, "env.mine.turns_kwargs.describe=false")
    assert run(evaluation(model, data, tmp_path / "plain", *plain, longer)) == 0
    tools, bare = (read_evaluation(tmp_path / name) for name in ("tools", "plain"))
    assert [problem.prompt for problem in tools.problems] == [problem.prompt for problem in bare.problems]
    assert [p.samples[0].text for p in tools.problems] != [p.samples[0].text for p in bare.problems]
    assert tools.summary.counts.unscored == 0


def test_an_evaluation_refuses_turns_that_it_cannot_take(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calculator = ("env.mine.turns=calculator", "env.mine.type=math")
    assert run(evaluation(model, data, tmp_path, *calculator, "eval.max_rollout_turns=1")) == 64
    assert "eval.max_rollout_turns = 1 ends a conversation" in capsys.readouterr().err
    assert (
        run(evaluation(Path("http:/"), data, tmp_path, *calculator, "generation.model_name=http://127.0.0.1:9/v1"))
        == 64
    )
    assert "a server gives text alone" in capsys.readouterr().err
    assert run(evaluation(model, data, tmp_path, "env.mine.turns=calculater", "env.mine.type=math")) == 64
    assert "did you mean 'calculator'?" in capsys.readouterr().err
