"""The header of a run states the learning rate that the run reaches, and a setting that has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import load_config
from posttrain.policy.trainer import ModelFacts
from posttrain.recipes.recipe import Prepared, _settings, header_lines


@pytest.mark.parametrize(
    ("setting", "max_steps", "expected"),
    [
        ("preset=nemo-dpo", 21, "lr 0.0001 after a warm-up of 20 steps"),
        (
            "preset=nemo-dpo",
            3,
            "lr at most 1.9e-05, as the warm-up to 0.0001 takes 20 steps (policy.scheduler=null: none)",
        ),
        ("policy.scheduler=null", 3, "lr 0.0001"),
        ("dpo.seed=1", 9, "lr 0.0001"),
        ("dpo.seed=1", 20, "lr 0.0001 after a warm-up of 2 steps"),
        ("dpo.seed=1", 10_000, "lr 0.0001 after a warm-up of 50 steps"),
    ],
)
def test_the_learning_rate_that_a_run_reaches(setting: str, max_steps: int, expected: str) -> None:
    config = load_config("dpo", None, [setting, "lr=1e-4"]).config
    assert _settings(config, max_steps)[0] == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["steps=9"], "epochs   sft.max_num_epochs = 2 ({file}:1) is not used: steps is given"),
        (["steps=9", "epochs=3"], None),
        (["sft.max_num_steps=9"], None),
    ],
)
def test_epochs_of_a_file_that_steps_replace_are_named(words: list[str], line: str | None, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sft: {max_num_epochs: 2}\n")
    loaded = load_config("sft", file, words)
    rows: Any = range(40)
    header = header_lines(
        loaded.config,
        Prepared(rows, None, rows, rows, "rows"),
        ModelFacts(1.0, 1, "cpu", "cpu", 1),
        num_devices=1,
        max_steps=9,
        planned="",
        unused_epochs=loaded.unused_epochs,
    )
    assert [shown for shown in header if "epochs" in shown] == ([line.format(file=file)] if line else [])


@pytest.mark.parametrize(
    ("words", "device", "num_parameters", "is_long"),
    [
        ([], "cpu", 135_000_000, True),
        ([], "cuda", 135_000_000, False),
        ([], "cpu", 100_000, False),
        (["prompts=2", "generations=4", "max_new_tokens=64"], "cpu", 135_000_000, False),
    ],
)
def test_steps_that_are_too_large_for_a_cpu_are_named(
    words: list[str], device: str, num_parameters: int, is_long: bool
) -> None:
    rows: Any = range(40)
    header = header_lines(
        load_config("grpo", None, words).config,
        Prepared(rows, None, rows, rows, "rows"),
        ModelFacts(1.0, num_parameters, device, "CPU", num_parameters),
        num_devices=1,
        max_steps=9,
        planned="",
        unused_epochs="",
    )
    assert any("262,144 tokens" in line for line in header) == is_long
