"""Settings of saving and of the optimizer's state, from the command line to the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import dpo, results_of, rows_of, run, weights_of

BF16 = "policy.precision=bfloat16"


def background_writes(folder: Path) -> int:
    return sum("timing/train/checkpoint_write" in row for row in rows_of(folder))


def test_the_setting_decides_where_checkpoints_are_written_and_not_what_is_in_them(
    model: Path, data: Path, tmp_path: Path
) -> None:
    settings = {
        "at_once": "checkpointing.async_save=false",
        "auto": "checkpointing.async_save=auto",
        "in_background": "checkpointing.async_save=true",
        "as_nemo_names_it": "checkpointing.is_async=true",
    }
    for name, setting in settings.items():
        assert run([*dpo(model, data, tmp_path / name, steps=5), setting]) == 0
    writes = {name: background_writes(tmp_path / name) for name in settings}
    assert writes["at_once"] == writes["auto"] == 0, "on a CPU it does not pay"
    assert min(writes["in_background"], writes["as_nemo_names_it"]) > 0
    for name in settings:
        assert results_of(tmp_path / name) == results_of(tmp_path / "at_once")
        for step in (2, 4, 5):
            expected = weights_of(tmp_path / "at_once" / f"step_{step}")
            assert weights_of(tmp_path / name / f"step_{step}") == expected


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Checkpoints of these steps cannot be written."""
    from posttrain.policy.checkpoint import files

    write = files.write

    def fail(folder: Path, *arguments: object) -> None:
        if int(folder.name.rpartition("_")[2].partition(".")[0]) in steps:
            raise OSError(28, "No space left on device")
        write(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write", fail)


def test_a_disk_that_is_full_ends_the_run_with_its_error(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_the_disk(monkeypatch, range(4, 1000))
    assert run([*dpo(model, data, tmp_path / "run", steps=100), "checkpointing.async_save=true"]) == 74
    shown = capsys.readouterr().err
    assert "No space left on device" in shown
    assert "; earlier checkpoints are untouched" in shown
    assert [path.name for path in (tmp_path / "run").glob("*step_*")] == ["step_2"]
    last = rows_of(tmp_path / "run")[-1]["step"]
    assert 5 <= last <= 6, "the save after the next step, or the one that is due, hears of it and tries again"


def test_a_disk_that_was_full_for_a_moment_costs_one_checkpoint(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_the_disk(monkeypatch, range(4, 5))
    assert run([*dpo(model, data, tmp_path / "run", steps=7), "checkpointing.async_save=true"]) == 0
    shown = capsys.readouterr()
    assert "could not be written in the background" in shown.out + shown.err
    saved = {path.name for path in (tmp_path / "run").glob("*step_*")}
    assert {"step_2", "step_6", "step_7"} <= saved <= {"step_2", "step_5", "step_6", "step_7"}


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (["state_dtype=int8"], [], "policy.optimizer.state_dtype: the checkpoint was made with int8"),
        (["master_weights=none"], [], "policy.optimizer.master_weights: the checkpoint was made with none"),
        ([], ["state_dtype=bf16"], "this run has bfloat16"),
    ],
)
def test_optimizer_state_in_another_format_is_refused_with_a_message(
    saved: list[str], now: list[str], message: str, model: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    def optimizer(settings: list[str]) -> list[str]:
        return [BF16, *(f"policy.optimizer.{setting}" for setting in settings)]

    assert run([*dpo(model, data, tmp_path / "run", steps=2), *optimizer(saved)]) == 0
    assert run([*dpo(model, data, tmp_path / "run", steps=4), *optimizer(now), "--resume-with-changes"]) == 64
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_the_format_of_the_state_changes_what_is_learnt_a_little_and_its_place_nothing(
    model: Path, data: Path, tmp_path: Path
) -> None:
    formats = {
        "float32": ["state_dtype=float32"],
        "int8": ["state_dtype=int8"],
        "int8_host": ["state_dtype=int8", "offload_states=true"],
        "none": ["state_dtype=int8", "master_weights=none"],
    }
    losses = {}
    for name, settings in formats.items():
        words = [BF16, *(f"policy.optimizer.{setting}" for setting in settings)]
        assert run([*dpo(model, data, tmp_path / name, steps=6), *words]) == 0
        losses[name] = [row["train/loss"] for row in results_of(tmp_path / name) if "train/loss" in row]
    assert losses["int8"] != losses["float32"]
    assert losses["int8"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["none"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["int8_host"] == losses["int8"]
