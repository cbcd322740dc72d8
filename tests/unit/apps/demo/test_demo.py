"""The demo: its folder is for one process at a time, and posttrain has nothing to say about its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.apps.demo import show as demo
from posttrain.config import load_config
from posttrain.errors import InputError


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained, with nothing but a folder as the result. The first GRPO is stopped."""
    seen: list[str] = []

    def train(kind: str, folder: Path, overrides: list[str]) -> int:
        seen.append(f"{kind} {'goes on' if (folder / kind).exists() else 'begins'}")
        (folder / kind).mkdir(exist_ok=True)
        (folder / "taught").mkdir(exist_ok=True)
        return 130 if seen.count("grpo begins") == 1 and kind == "grpo" and "grpo goes on" not in seen else 0

    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "build_model", lambda folder, seed: 10)
    monkeypatch.setattr(demo, "write_data", lambda folder, seed: None)
    monkeypatch.setattr(demo, "_summarise", lambda folder, seconds: None)
    return seen


def test_a_demo_that_was_stopped_goes_on_and_one_that_is_over_begins_anew(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert demo.show(folder, seed=1, steps=5) == 130
    assert demo.show(folder, seed=1, steps=5) == 0
    assert runs == ["sft begins", "grpo begins", "sft goes on", "grpo goes on"]
    assert "Resuming the stopped demo" in capsys.readouterr().out
    assert demo.show(folder, seed=1, steps=5) == 0
    assert runs[-1] == "grpo begins"
    assert "Starting over" in capsys.readouterr().out


def test_a_stopped_demo_with_other_settings_is_another_one(tmp_path: Path, runs: list[str]) -> None:
    assert demo.show(tmp_path / "demo", seed=1, steps=5) == 130
    demo.show(tmp_path / "demo", seed=2, steps=5)
    assert runs[-1] == "grpo begins"


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        demo._claimed(tmp_path / "demo", {"seed": 1}),
        pytest.raises(InputError, match="another demo is running there"),
        demo._claimed(tmp_path / "demo", {"seed": 1}),
    ):
        pass


def test_what_is_no_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds something else than a demo"), demo._claimed(tmp_path, {"seed": 1}):
        pass
    assert (tmp_path / "thesis.txt").exists()


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
