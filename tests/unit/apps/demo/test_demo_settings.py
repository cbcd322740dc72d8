"""The demo's own settings are ones that posttrain has nothing to say about."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.apps.demo import show as demo
from posttrain.config import load_config


@pytest.mark.parametrize("steps", [1, 7, 20, 50, demo.GRPO_STEPS, 137, 1000])
def test_every_checkpoint_that_is_ranked_by_a_validation_has_one(steps: int) -> None:
    loaded = load_config("grpo", None, demo.grpo_overrides(Path("demo"), seed=1, steps=steps))
    grpo, checkpointing = loaded.config.grpo, loaded.config.checkpointing
    assert checkpointing.metric_name == "val:accuracy"
    saved = range(checkpointing.save_period, steps, checkpointing.save_period)
    assert [step for step in saved if step % grpo.val_period] == []
    assert grpo.val_at_end, "the last step is saved whatever the periods are"
    assert len(saved) <= 3, "saving is not what the demo shows"
    assert loaded.warnings == []


def test_teaching_the_format_ranks_no_checkpoints() -> None:
    loaded = load_config("sft", None, demo.sft_overrides(Path("demo"), seed=1))
    assert loaded.config.checkpointing.metric_name is None
    assert loaded.warnings == []
