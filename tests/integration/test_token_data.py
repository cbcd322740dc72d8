"""The tokens that a run keeps for looking at them: what is in the file, and that keeping them changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import grpo, results_of, run, save_data, save_model

from posttrain.reporting.rows import read_rollouts
from posttrain.reporting.token_files import read_tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run with token data of every step (1) and of none (0)."""
    home = tmp_path_factory.mktemp("token_data")
    model, data = save_model(home / "model"), save_data(home / "data")
    for period in (0, 1):
        settings = [f"logger.token_data_period={period}", "logger.token_data_groups=2"]
        assert run([*grpo(model, data, home / f"run_{period}", steps=2), *settings]) == 0
    return {period: home / f"run_{period}" for period in (0, 1)}


def test_keeping_tokens_does_not_change_the_run(folders: dict[int, Path]) -> None:
    assert results_of(folders[1]) == results_of(folders[0])


def test_period_zero_writes_no_tokens(folders: dict[int, Path]) -> None:
    assert not list(folders[0].glob("rollouts/*.npz"))


def test_token_file_has_the_numbers_of_the_step(folders: dict[int, Path]) -> None:
    for step in (1, 2):
        file = read_tokens(folders[1] / "rollouts" / f"step_{step}.tokens.npz")
        assert file is not None
        groups = read_rollouts(folders[1] / "rollouts" / f"step_{step}.jsonl.gz")
        assert sorted(set(file.draws.tolist())) == [groups[0]["draw"], groups[2]["draw"]], (
            "2 of 4 groups, spread evenly"
        )
        for group in (groups[0], groups[2]):
            for sample, completion in enumerate(group["completions"]):
                part = file.answer(group["draw"], sample)
                assert part is not None
                assert part.stop - part.start == completion["num_tokens"]
                without_special_tokens = re.sub(r"<\|\w+\|>", "", "".join(file.pieces(part)))
                assert without_special_tokens == completion["text"]
                np.testing.assert_allclose(file.advantages[part], completion["advantage"], rtol=1e-6)
                np.testing.assert_allclose(file.sampler_logprobs[part], file.trainer_logprobs[part], atol=1e-4)
        assert file.reference_logprobs is not None
        # The policy is its own reference until it has been updated.
        gap = np.abs(file.reference_logprobs - file.trainer_logprobs).max()
        assert gap < 1e-5 if step == 1 else gap > 1e-3


def test_workers_file_has_phases_and_ranks(folders: dict[int, Path]) -> None:
    rows = [json.loads(line) for line in (folders[1] / "workers.jsonl").read_text().splitlines()]
    assert any("Training" in row["phase"] for row in rows)
    (rank,) = next(row["ranks"] for row in rows if row.get("ranks"))
    assert rank["rank"] == 0
    assert rank["device"] == "cpu"
    assert 0 < rank["allocated_bytes"] <= rank["total_bytes"]
