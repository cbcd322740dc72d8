"""A reward that failed is not a reward of zero: the run goes on, and says which answers it could not judge, and why."""

from __future__ import annotations

import json
import math
import statistics
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import grpo, results_of, run
from transformers import AutoModelForCausalLM

from posttrain.reporting.rows import read_rollouts

# What happens to an answer depends on its text only, so that the test can tell it beforehand.
TREACHEROUS = """
import os, time, zlib

def f(prompt, response, reference):
    fate = zlib.crc32(response.encode()) % 10
    if fate == 0:
        raise ValueError("cannot read this answer")
    if fate == 1:
        time.sleep(60)
    if fate == 2:
        os._exit(7)
    if fate == 3:
        return "high"
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""
REASONS = {
    0: "ValueError: cannot read this answer",
    1: "timeout after 3 s",
    2: "exited with code 7",
    3: "returned 'high' (str)",
}
STEPS = 4


def fate(text: str) -> int:
    return zlib.crc32(text.encode()) % 10


@pytest.fixture(scope="module")
def treacherous(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which some rewards raise, hang, exit or are no number."""
    folder = tmp_path_factory.mktemp("treacherous")
    (folder / "mean.py").write_text(TREACHEROUS)
    arguments = grpo(model, data, folder, steps=STEPS, reward=f"{folder / 'mean.py'}:f")
    assert run([*arguments, "env.mine.timeout_s=3", "env.mine.num_workers=2", "grpo.val_period=0"]) == 0
    return folder


def completions_of(folder: Path, step: int) -> list[dict[str, Any]]:
    groups = read_rollouts(folder / "rollouts" / f"step_{step}.jsonl.gz")
    return [completion for group in groups for completion in group["completions"]]


@pytest.mark.invariant
def test_failed_rewards_are_unscored_with_their_reason_and_the_others_are_scored(treacherous: Path) -> None:
    met = set()
    for step in range(1, STEPS + 1):
        for completion in completions_of(treacherous, step):
            met.add(fate(completion["text"]))
            text = completion["text"]
            if fate(text) in REASONS:
                assert completion["reward"] is None
                assert REASONS[fate(text)] in completion["error"]
                assert completion["advantage"] == 0
            else:
                assert completion["reward"] == sum(ord(c) % 2 for c in text) / max(1, len(text))
                assert completion["error"] is None
    assert met >= set(REASONS), "every way to fail was met"


def test_unscored_rollouts_are_counted_and_left_out_of_the_mean(treacherous: Path) -> None:
    for row in results_of(treacherous):
        completions = completions_of(treacherous, row["step"])
        rewards = [c["reward"] for c in completions if c["reward"] is not None]
        assert row["train/unscored"] == len(completions) - len(rewards)
        assert row["train/reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-12)
        assert row["train/reward_min"] == min(rewards)
    assert sum(row["train/unscored"] for row in results_of(treacherous)) >= 10


def test_advantages_compare_with_the_scored_others_only(treacherous: Path) -> None:
    compared = 0
    for step in range(1, STEPS + 1):
        for group in read_rollouts(treacherous / "rollouts" / f"step_{step}.jsonl.gz"):
            scored = [c for c in group["completions"] if c["reward"] is not None]
            for completion in scored:
                rewards = [c["reward"] for c in scored]
                if len(set(rewards)) < 2:
                    continue
                others = [c["reward"] for c in scored if c is not completion]
                expected = (completion["reward"] - statistics.fmean(others)) / (statistics.stdev(rewards) + 1e-6)
                assert completion["advantage"] == pytest.approx(expected, rel=1e-6)
                compared += len(scored) < len(group["completions"])
    assert compared > 5, "groups with and without a reward were met"


def test_the_others_still_train(treacherous: Path, model: Path) -> None:
    for row in results_of(treacherous):
        assert row["train/grad_norm"] > 0
        assert math.isfinite(row["train/loss"])
    tuned = AutoModelForCausalLM.from_pretrained(treacherous / f"step_{STEPS}" / "policy" / "weights" / "model")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(tuned.get_input_embeddings().weight, before.get_input_embeddings().weight)


def test_the_report_and_the_list_of_reasons_say_so(treacherous: Path) -> None:
    report = (treacherous / "report.html").read_text()
    assert "could not be scored" in report.lower() or "unscored" in report.lower()
    assert "cannot read this answer" in report
    assert "timeout after 3 s" in report
    reasons = [json.loads(line) for line in (treacherous / "unscored.jsonl").read_text().splitlines()]
    assert sum(row["count"] for row in reasons) == sum(row["train/unscored"] for row in results_of(treacherous))
    raised = [row for row in reasons if row["reason"] == REASONS[0]]
    assert 'raise ValueError("cannot read this answer")' in raised[0]["traceback"]


def test_step_without_scores_changes_nothing_and_warns(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def f(prompt, response, reference):\n    return 1 / 0\n")
    folder = tmp_path / "run"
    arguments = grpo(model, data, folder, steps=2, reward=f"{tmp_path / 'bad.py'}:f")
    assert run(arguments) == 65, "not taken for success"
    output = capsys.readouterr().out
    assert output.count("return 1 / 0") == 1, "the first traceback is shown"
    assert "none of the 16 rollouts could be scored" in output
    assert "not one of the 32 rollouts could be scored" in output
    assert run(arguments) == 65, "nothing to do, and still no success"
    rows = results_of(folder)
    assert [row["train/unscored"] for row in rows] == [16, 16]
    assert all("train/reward" not in row for row in rows)
    assert rows[-1]["validation/unscored"] == 3
    tuned = AutoModelForCausalLM.from_pretrained(folder / "step_2" / "policy" / "weights" / "model")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize(
    ("max_new_tokens", "why"),
    [(3, "cut off at policy.generation.max_new_tokens"), (48, "too easy or too hard")],
)
def test_equal_rewards_warn_that_advantages_are_zero(
    max_new_tokens: int, why: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.py").write_text("def f(prompt, response, reference):\n    return 0.5\n")
    folder = tmp_path / "run"
    arguments = grpo(model, data, folder, steps=2, reward=f"{tmp_path / 'same.py'}:f")
    # Common letters end an answer, so that most of the long ones are not cut off.
    settings = ["loss_fn.reference_policy_kl_penalty=0", f"policy.generation.max_new_tokens={max_new_tokens}"]
    stops = "policy.generation.stop_strings=[a,e,i,o,u,n,s,t,r,'1','2','3',' ']"
    assert run([*arguments, *settings, *([stops] if max_new_tokens > 3 else [])]) == 0
    output = capsys.readouterr().out
    assert why in output
    assert 1 <= output.count("so every advantage is 0 and nothing is learnt") <= 2, "said once, and counted in the end"
    assert [row["train/groups_with_signal"] for row in results_of(folder)] == [0, 0]
    assert [row["train/grad_norm"] for row in results_of(folder)] == [0, 0]
    assert "nothing is learnt" in (folder / "report.html").read_text()
