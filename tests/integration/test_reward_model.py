"""A reward model from pairs to rewards: trained, saved for everybody's tools, used as a judge of GRPO."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import LORA, grpo, questions, results_of, rm, rows_of, run, save_data, save_model, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.environments import build_environments
from posttrain.errors import InputError
from posttrain.types import Completion, Conversation, Task, Utterance

WEIGHTS = Path("policy", "weights", "model")
FLOAT32 = {"type": "reward_model", "device": "cpu", "precision": "float32"}


def prefers_early_letters(count: int, seed: int) -> list[dict[str, str]]:
    """The better answer has more letters of the first half of the alphabet; both are mixed."""
    rng = random.Random(seed)

    def word(early: int, length: int) -> str:
        letters = [rng.choice("abcdefghijklm") for _ in range(early)]
        letters += [rng.choice("nopqrstuvwxyz") for _ in range(length - early)]
        rng.shuffle(letters)
        return "".join(letters)

    rows = []
    for row in questions(count, seed):
        length = rng.randrange(4, 9)
        worse = rng.randrange(0, length - 2)
        better = rng.randrange(worse + 2, length + 1)
        rows.append({"prompt": row["input"], "chosen": word(better, length), "rejected": word(worse, length)})
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and reward models trained on it: all weights (`full`), and adapters (`lora`)."""
    home = tmp_path_factory.mktemp("home")
    model, data = save_model(home / "model"), save_data(home / "data")
    write_rows(data / "pairs.jsonl", prefers_early_letters(240, seed=0))
    write_rows(data / "held_out_pairs.jsonl", prefers_early_letters(60, seed=1))
    settings = ["policy.train_global_batch_size=24", "policy.optimizer.kwargs.lr=5e-3", "checkpointing.save_period=60"]
    packing = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=512"]
    settings += ["rm.val_period=30", *packing]
    assert run([*rm(model, data, home / "full", steps=60), *settings]) == 0
    assert run([*rm(model, data, home / "lora", steps=60), *settings, *LORA]) == 0
    return home


def conversation(row: dict[str, str], key: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]


def task_of(prompt: str, draw: int = 0) -> Task:
    return Task(draw, f"t:{draw}", prompt, (draw + 1,), messages=({"role": "user", "content": prompt},))


def answer(text: str) -> Completion:
    return Completion((1, 2), (0.0, 0.0), text, "stop")


def scores_of(home: Path, tasks: Any, answers: Any, name: str = "full", progress: Any = None, **keys: Any) -> Any:
    """What the environment with this reward model says."""
    block = {**FLOAT32, "model_name": str(home / name / "step_60"), **keys}
    with build_environments({"rm": block}) as environment:
        return environment.score(tasks, answers, progress)


def transformers_scores(home: Path, conversations: list[Any], name: str = "full") -> list[float]:
    """As anybody would: the saved tokenizer's template, a padded batch, the model's own forward pass."""
    folder = home / name / "step_60" / WEIGHTS
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == "full":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    else:
        from peft import AutoPeftModelForSequenceClassification

        model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    padded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores: list[float] = model.eval()(**padded).logits[:, 0].tolist()
    return scores


@pytest.mark.invariant
def test_a_reward_model_learns_what_the_pairs_prefer(home: Path) -> None:
    for name in ("full", "lora"):
        last = [row for row in results_of(home / name) if "validation/accuracy" in row][-1]
        assert last["validation/accuracy"] >= 0.9, name
        assert last["validation/rewards_chosen_mean"] > last["validation/rewards_rejected_mean"] + 1
        assert last["validation/rewards_std"] > 0.5
        mean = (last["validation/rewards_chosen_mean"] + last["validation/rewards_rejected_mean"]) / 2
        assert last["validation/rewards_mean"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_checkpoint_gives_everybody_the_scores_of_the_environment(home: Path, name: str) -> None:
    rows = prefers_early_letters(6, seed=2)
    expected = transformers_scores(home, [conversation(r, key) for r in rows for key in ("chosen", "rejected")], name)
    tasks = [task_of(row["prompt"], draw) for draw, row in enumerate(rows) for _ in range(2)]
    completions = [answer(row[key]) for row in rows for key in ("chosen", "rejected")]
    scores = scores_of(home, tasks, completions, name)
    assert [score.reward for score in scores] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_scores_depend_on_the_budget_of_a_batch_in_rounding_alone(home: Path) -> None:
    rows = prefers_early_letters(5, seed=3)
    tasks = [task_of(row["prompt"], draw) for draw, row in enumerate(rows) for _ in range(2)]
    completions = [answer(row[key]) for row in rows for key in ("chosen", "rejected")]
    weights = str(home / "full" / "step_60" / WEIGHTS)
    found, finished = [], []
    for budget in (8, 60, 16384):
        seen: list[int] = []
        settings = {"model_name": weights, "max_batch_tokens": budget}
        found.append([one.reward for one in scores_of(home, tasks, completions, progress=seen.append, **settings)])
        finished.append([count for count in seen if count])
        assert sum(seen) == 10
    assert found[0] == pytest.approx(found[2], rel=1e-5, abs=1e-5)
    assert found[1] == pytest.approx(found[2], rel=1e-5, abs=1e-5)
    assert [len(counts) > 1 for counts in finished] == [True, True, False], "small budgets make several passes"


def test_what_cannot_be_scored_is_unscored_with_the_reason(home: Path) -> None:
    tasks = [task_of("1 + 1 = ?"), task_of("1 + 1 = ?"), Task(1, "t:1", "bare", (9,))]
    completions = [answer("abc"), answer("abc" * 20), answer("abc")]
    scores = scores_of(home, tasks, completions, max_model_len=40)
    assert scores_of(home, [], []) == []
    assert scores[0].scored
    assert scores[1].reward is None
    assert "at most 40" in str(scores[1].error)
    assert scores[2].reward is None
    assert "no messages" in str(scores[2].error)


def test_any_text_gets_a_score_or_a_reason_and_no_exception(home: Path) -> None:
    texts = ["", " \n", "\\boxed{", "<|im_end|>", "\x00", "\ud800", "🙂", "a" * 20_000]
    scores = scores_of(home, [task_of("?")] * len(texts), [answer(text) for text in texts])
    assert [score.scored for score in scores] == [True, True, True, True, True, False, True, False]
    assert all(score.scored == (score.error is None) for score in scores)
    assert all("\n" not in str(score.error) for score in scores)


def test_scores_are_normalised_and_the_bare_score_is_kept(home: Path) -> None:
    task, said = [task_of("2 + 2 = ?")], [answer("abba")]
    [bare], [normalised] = scores_of(home, task, said), scores_of(home, task, said, score_mean=0.5, score_std=4.0)
    assert bare.reward is not None
    assert bare.parts == {}
    assert normalised.reward == pytest.approx((bare.reward - 0.5) / 4)
    assert normalised.parts == {"score": pytest.approx(bare.reward)}


@pytest.mark.parametrize("name", ["full", "lora"])
def test_without_a_precision_it_is_the_one_that_the_weights_are_saved_in(home: Path, name: str) -> None:
    fp32, bf16, saved = (
        scores_of(home, [task_of("2 + 2 = ?")], [answer("abba")], name, precision=precision)[0].reward
        for precision in ("float32", "bfloat16", None)
    )
    assert saved == fp32 != bf16
    assert bf16 == pytest.approx(fp32, abs=0.2)


def test_the_turns_of_a_conversation_are_read_in_order(home: Path) -> None:
    turns = (Utterance("assistant", "nop", 3), Utterance("user", "again", 5), Utterance("assistant", "abc", 3))
    said = Completion((1,), (0.0,), "nopagainabc", "stop", conversation=Conversation(turns))
    messages = [{"role": "user", "content": "?"}, *({"role": t.role, "content": t.text} for t in turns)]
    [expected] = transformers_scores(home, [messages])
    [score] = scores_of(home, [task_of("?")], [said])
    assert score.reward == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_wrong_model_error_names_the_field(home: Path, tmp_path: Path) -> None:
    for name, words in ((str(home / "model"), "not a reward model"), (str(tmp_path / "nowhere"), "no folder")):
        with pytest.raises(InputError, match=rf"env\.rm\.model_name.*{words}"):
            build_environments({"rm": {**FLOAT32, "model_name": name}})
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"env\.rm\.device is cuda"):
            build_environments({"rm": {**FLOAT32, "model_name": str(home / "full" / "step_60"), "device": "cuda"}})
    with pytest.raises(InputError, match=r"env\.rm\.score_std"):
        build_environments({"rm": {**FLOAT32, "model_name": "x", "score_std": 0}})


def test_grpo_learns_what_the_reward_model_rewards(home: Path, tmp_path: Path) -> None:
    model, data, folder = home / "model", home / "data", tmp_path / "run"
    arguments = [word for word in grpo(model, data, folder, steps=24) if not word.startswith("env.mine")]
    block = {**FLOAT32, "model_name": str(home / "full" / "step_60"), "max_model_len": 100}
    arguments += [f"env.mine.{key}={value}" for key, value in block.items()]
    arguments += ["loss_fn.reference_policy_kl_penalty=0", "policy.generation.max_new_tokens=6", "grpo.val_period=0"]
    assert run(arguments) == 0

    rewards = [row["train/reward"] for row in rows_of(folder) if "train/reward" in row]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 1, rewards
    assert all(row.get("train/unscored", 0) == 0 for row in rows_of(folder))
    with gzip.open(folder / "rollouts" / "step_1.jsonl.gz", "rt") as file:
        groups = [json.loads(line) for line in file]
    prompts = {str(row["input"]) for row in questions(22)}
    conversations, rewards = [], []
    for group in groups:
        [prompt] = [prompt for prompt in prompts if prompt in group["prompt"]]
        for sample in group["completions"]:
            conversations.append(conversation({"prompt": prompt, "answer": sample["text"]}, "answer"))
            rewards.append(sample["reward"])
    assert len(rewards) == 16
    assert rewards == pytest.approx(transformers_scores(home, conversations), rel=1e-3, abs=1e-3)


def test_training_goes_on_from_a_reward_model(home: Path, tmp_path: Path) -> None:
    """The scoring layer is kept: the first step starts where the other run ended."""
    arguments = rm(home / "full" / "step_60" / WEIGHTS, home / "data", tmp_path / "more", steps=1)
    assert run([*arguments, "rm.val_at_start=true"]) == 0
    first = next(row for row in results_of(tmp_path / "more") if "validation/accuracy" in row)
    last = [row for row in results_of(home / "full") if "validation/accuracy" in row][-1]
    assert first["validation/loss"] == pytest.approx(last["validation/loss"], rel=1e-4)


@pytest.mark.parametrize("setting", ["rm.center_rewards_coefficient=0.1", "rm.margin_from_rewards=true", "rm.seed=7"])
def test_each_setting_of_the_loss_changes_it(setting: str, home: Path, tmp_path: Path) -> None:
    losses = []
    for name, more in (("plain", []), ("changed", [setting])):
        arguments = rm(home / "model", home / "data", tmp_path / name, steps=1)
        assert run([*arguments, "data.shuffle=false", "rm.val_period=0", *more]) == 0
        losses.append(rows_of(tmp_path / name)[-1]["train/loss"])
    assert losses[0] != losses[1]


def test_a_model_that_cannot_score_is_refused_before_training(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word for word in grpo(home / "model", home / "data", tmp_path / "run") if "env.mine." not in word]
    assert run([*arguments, "env.mine.type=reward_model", f"env.mine.model_name={home / 'model'}"]) == 64
    assert "env.mine.model_name" in capsys.readouterr().err
    assert run(["rm", "policy.reward_model_cfg.enabled=false"]) == 64
    assert "posttrain rm" in capsys.readouterr().err
