"""A GRPO run's prompts are screened with its own config, and the run trains on what is kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import grpo, rows_of, run, write_rows

from posttrain.apps.evaluate import screening
from posttrain.apps.evaluate.screening import ScreenFiles

REWARDS = """
def by_level(prompt, response, reference, metadata):
    if metadata["level"] == "broken":
        raise ValueError("no such level")
    if metadata["level"] == "mixed":
        return float(sum(map(ord, response)) % 2)
    return float(metadata["level"] == "easy")
"""
TALK = """
from posttrain.environments.turns import Turn, TurnEnvironment

class Talk(TurnEnvironment):
    def reset(self, task):
        return 0

    def step(self, state, response):
        if state == 1:
            return Turn(reward=float(sum(map(ord, response)) % 2), done=True)
        return Turn(state + 1, "and now?")
"""
LEVELS = ("mixed", "hard", "easy", "mixed", "mixed", "broken")


append = ScreenFiles.append


def append_and_terminate(files: ScreenFiles, *measured: Any) -> None:
    append(files, *measured)
    os.kill(os.getpid(), signal.SIGTERM)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kept_prompts_are_those_with_differing_rewards_and_a_run_trains_on_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"input": f"{k} + 1 = ?", "output": str(k + 1), "level": LEVELS[k % 6], "tags": ["ä", k]} for k in range(30)
    ]
    write_rows(tmp_path / "questions.jsonl", rows)
    write_rows(tmp_path / "held_out_questions.jsonl", rows[:3])
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = grpo(model, tmp_path, tmp_path / "run", steps=1, reward=f"{tmp_path / 'rewards.py'}:by_level")[1:]

    def screen(out: str, *options: str) -> int:
        return run(["data", "screen", "--out", str(tmp_path / out), "--samples", "4", *options, *settings])

    assert screen("s.jsonl") == 0
    shown = capsys.readouterr().out
    summary = json.loads((tmp_path / "s.screen.json").read_text())
    counts = summary["prompts"]
    assert (counts["unscored"], summary["num_unscored_answers"]) == (5, 20), "failed rewards are not zeros"
    assert min(counts["too hard"], counts["too easy"], counts["kept"]) >= 4
    assert (sum(counts.values()), counts["not measured"]) == (30, 0)
    assert (summary["model"], summary["config"]["grpo"]["num_prompts_per_step"]) == (str(model), 4)

    kept = read(tmp_path / "s.jsonl")
    assert len(kept) == counts["kept"]
    assert {row["level"] for row in kept} == {"mixed"}
    for row in kept:
        assert 0 < row.pop("screen_mean_reward") < 1
        assert row.pop("screen_num_scored") == 4
    assert kept == [row for row in rows if row in kept], "all columns, in the order of the data"
    assert f"data.train.data_path={tmp_path / 's.jsonl'}" in shown.splitlines()[-1]

    # The same seed gives the same rewards, whatever was measured before and together.
    with monkeypatch.context() as patch:
        patch.setitem(screening._TOKENS_PER_BATCH, "cpu", 7 * 4 * 12)  # batches of seven prompts
        patch.setattr(ScreenFiles, "append", append_and_terminate)
        assert screen("parts.jsonl") == 85
    partly = json.loads((tmp_path / "parts.screen.json").read_text())["prompts"]
    assert (partly["not measured"], len(read(tmp_path / "parts.jsonl"))) == (23, partly["kept"])
    assert screen("parts.jsonl") == 0
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "s.jsonl").read_bytes()

    assert screen("s.jsonl", "--keep", "1.5:2") == 64
    error = capsys.readouterr().err
    assert all(words in error for words in ("--keep 1.5:2", "too hard", "0 ("))
    assert len(read(tmp_path / "s.jsonl")) == counts["kept"], "the file is as it was"

    assert run(["grpo", *settings, f"data.train.data_path={tmp_path / 's.jsonl'}", "grpo.val_period=0"]) == 0
    (row,) = [row for row in rows_of(tmp_path / "run") if "train/groups_with_signal" in row]
    assert row["train/unscored"] == 0


def test_conversations_of_several_turns_are_screened_by_their_reward(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    settings = [word for word in grpo(model, data, tmp_path / "run")[1:] if not word.startswith("env.mine.function")]
    turns = [f"env.mine.turns={tmp_path / 'talk.py'}:Talk", "grpo.max_rollout_turns=2"]
    assert run(["data", "screen", "--out", str(tmp_path / "s.jsonl"), *settings, *turns]) == 0
    summary = json.loads((tmp_path / "s.screen.json").read_text())
    assert summary["num_unscored_answers"] == 0
    assert len(read(tmp_path / "s.jsonl")) == summary["prompts"]["kept"] > 0
