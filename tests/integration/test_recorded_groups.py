"""GRPO from labelled traces: it learns from a record alone, says how far it has moved, and resumes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tiny_runs import assert_same_curves, recorded, results_of, rows_of, run, save_data, save_model, traces, write_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    save_model(folder / "model")
    save_data(folder / "data")
    return folder


@pytest.mark.invariant
def test_liked_answers_become_likelier_than_disliked_ones(world: Path, tmp_path: Path) -> None:
    assert run(recorded(world / "model", world / "data", tmp_path / "run", steps=12)) == 0
    rows = rows_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert first["train/probs_ratio"] == pytest.approx(1.0, abs=1e-4), "before the first update nothing has moved"
    assert first["train/policy_shift_kl"] == pytest.approx(0.0, abs=1e-4)
    assert last["train/policy_shift_kl"] > 0.01
    assert last["train/clip_fraction"] > 0
    assert last["train/advantage_weighted_shift"] > 0.05 > abs(first["train/advantage_weighted_shift"])
    assert all(row["train/reward"] == pytest.approx(0.5, abs=0.35) for row in rows), "the record's own rewards"


def test_a_group_with_equal_rewards_is_left_out_and_counted(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = traces(12, 6) + [{"input": "9 + 9 = ?", "output": word, "final_reward": 1.0} for word in ("ab", "cd")]
    path = write_rows(tmp_path / "traces.jsonl", rows)
    arguments = recorded(world / "model", world / "data", tmp_path / "run", f"data.train.data_path={path}", steps=1)
    assert run(arguments) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "1 rows left out: all recorded rewards of the prompt are equal" in printed


def test_fresh_answers_join_the_recorded_ones_in_one_group(world: Path, tmp_path: Path) -> None:
    assert (
        run(recorded(world / "model", world / "data", tmp_path / "run", "grpo.num_recorded_per_prompt=2", steps=2)) == 0
    )
    with gzip.open(tmp_path / "run/rollouts/step_1.jsonl.gz", "rt") as lines:
        groups = [json.loads(line) for line in lines]
    known = {row["output"] for row in traces(20, 6)}
    for group in groups:
        texts = [completion["text"] for completion in group["completions"]]
        assert len(texts) == 4
        assert set(texts[:2]) <= known
    assert any(text not in known for group in groups for text in (c["text"] for c in group["completions"][2:]))


@pytest.mark.parametrize("extra", [[], ["grpo.num_recorded_per_prompt=2", "policy.train_global_batch_size=10"]])
def test_a_resumed_run_equals_the_uninterrupted_one(world: Path, tmp_path: Path, extra: list[str]) -> None:
    assert run(recorded(world / "model", world / "data", tmp_path / "whole", *extra)) == 0
    assert run(recorded(world / "model", world / "data", tmp_path / "parts", *extra, steps=4)) == 0
    assert run(recorded(world / "model", world / "data", tmp_path / "parts", *extra)) == 0
    assert results_of(tmp_path / "parts") == results_of(tmp_path / "whole")


def test_recorded_keys_without_a_record_are_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = recorded(world / "model", world / "data", tmp_path / "run", "grpo.num_recorded_per_prompt=5")
    assert run(arguments) == 64
    assert "grpo.num_recorded_per_prompt = 5 is more than all answers of a prompt" in capsys.readouterr().err


def test_recorded_groups_are_independent_of_packing_and_micro_batching(world: Path, tmp_path: Path) -> None:
    mixed = ["grpo.num_recorded_per_prompt=2"]
    alone = ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1", "policy.logprob_batch_size=1"]
    assert run(recorded(world / "model", world / "data", tmp_path / "packed", *mixed, steps=3)) == 0
    assert run(recorded(world / "model", world / "data", tmp_path / "alone", *mixed, *alone, steps=3)) == 0
    assert_same_curves(tmp_path / "packed", tmp_path / "alone", but="packing")
