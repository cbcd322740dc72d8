"""A run folder has one writer; what happens when the folder or its files are taken away, and how to begin again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_runs import count_rows, grpo, rows_of, run, sft, start, wait_until, weights_of

from posttrain.cli.main import main
from posttrain.files.run_folder_lock import read_attempts

LR = "policy.optimizer.kwargs.lr"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.invariant
def test_a_second_command_is_refused_and_the_first_is_not_disturbed(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log, hold = tmp_path / "run", tmp_path / "log", tmp_path / "hold"
    hold.touch()
    arguments = [*sft(model, data, folder, steps=3), "checkpointing.save_period=2"]
    process = start([*arguments, f"{LR}=1e-2"], log, hold)
    assert wait_until(lambda: list(folder.glob("tmp_step_2*")), process), "it stays there until it is let go"
    before = (folder / "config.yaml").read_bytes()
    assert run([*arguments, f"{LR}=3e-3"]) == 75
    message = capsys.readouterr().err
    assert f"is in use by process {process.pid} on {os.uname().nodename}" in message
    assert "since 20" in message
    assert run([*arguments, f"{LR}=1e-2", "--restart"]) == 75, "no flag takes a folder from its holder"
    assert (folder / "config.yaml").read_bytes() == before
    hold.unlink()
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 3]
    (record,) = read_attempts(folder)
    assert (record.holder.pid, record.first_checkpoint, record.last_checkpoint, record.exit_code) == (
        process.pid,
        2,
        3,
        0,
    )


def test_a_folder_that_is_moved_away_during_the_run_is_noticed_and_made_again(
    model: Path, data: Path, tmp_path: Path
) -> None:
    folder, log, gate = tmp_path / "run", tmp_path / "log", tmp_path / "gate"
    gate.touch()
    (tmp_path / "rewards.py").write_text(
        "import os, time\ndef f(prompt, response, reference):\n"
        f"    while os.path.exists({str(gate)!r}) and os.path.exists({str(folder / 'metrics.jsonl')!r}):\n"
        "        time.sleep(0.01)\n    return float(len(response))\n"
    )
    arguments = grpo(model, data, folder, steps=3, reward=f"{tmp_path / 'rewards.py'}:f")
    process = start([*arguments, "grpo.val_period=0", "checkpointing.save_period=100", "env.mine.timeout_s=60"], log)
    assert wait_until(lambda: count_rows(folder) >= 1, process)
    os.rename(folder, tmp_path / "moved")  # step 2 waits for it
    gate.unlink()
    process.join()
    assert process.exitcode == 1, log.read_text()
    assert "was deleted or replaced after step 1" in log.read_text()
    assert "the record of the steps up to 1 is lost" in log.read_text()
    assert [row["step"] for row in rows_of(folder)] == [2, 3]
    assert (folder / "config.yaml").read_bytes() == (tmp_path / "moved" / "config.yaml").read_bytes()
    assert (folder / "step_2").is_dir(), "saved at once: the checkpoints are gone, too"
    assert (folder / "step_3").is_dir()
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert not (tmp_path / "moved" / "step_2").exists()


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert (
        run([*sft(model, data, folder, steps=4), "checkpointing.save_period=2", "checkpointing.keep_top_k=null"]) == 0
    )
    return folder


def settings(model: Path, data: Path, folder: Path, steps: int) -> list[str]:
    return [*sft(model, data, folder, steps=steps), "checkpointing.save_period=2", "checkpointing.keep_top_k=null"]


def test_missing_metrics_are_named_when_the_run_resumes(
    finished: Path, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert run(settings(model, data, folder, steps=5)) == 0
    words = "metrics.jsonl is missing: the rows of the steps up to 4 are lost"
    assert f"warning: {words}" in capsys.readouterr().out
    assert any(row["text"] == words for row in json.loads((folder / "run.json").read_text())["warnings"])


def test_damaged_checkpoints_are_refused_and_restart_begins_anew_and_deletes_nothing(
    finished: Path, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    for step in (2, 4):
        with (folder / f"step_{step}" / "training_info.json").open("ab") as file:
            file.write(b" ")
    before = contents(folder)
    assert run(settings(model, data, folder, steps=4)) == 64
    message = capsys.readouterr().err
    for word in (
        "none of its 2 checkpoints is intact",
        "step_2: training_info.json",
        "step_4: training_info",
        "--restart",
    ):
        assert word in message
    assert contents(folder) == before

    assert main([*settings(model, data, folder, steps=4), "--restart"]) == 0
    assert f"the run in {folder} is set aside in earlier_001/" in capsys.readouterr().out
    kept = contents(folder / "earlier_001")
    assert {name: before[name] for name in kept} == kept
    assert {name for name in before if not name.startswith("attempts/")} == set(kept)
    assert weights_of(folder / "step_4") == weights_of(finished / "step_4")
    assert len(rows_of(folder)) == len(rows_of(finished))
    assert [record.number for record in read_attempts(folder)] == [1, 2]


def test_restart_with_other_settings_is_not_refused(finished: Path, model: Path, data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    for count in (1, 2):
        assert run([*settings(model, data, folder, steps=2), f"{LR}=1e-{count}", "--restart"]) == 0
        assert (folder / f"earlier_00{count}" / "config.yaml").exists()
    assert (folder / "earlier_001" / "step_4").is_dir()
    assert not (folder / "step_4").exists()
