"""How a run stops, what it leaves on the disk, and how the same command goes on from there."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny_runs import (
    LORA,
    count_rows,
    dpo,
    grpo,
    results_of,
    rows_of,
    run,
    save_data,
    save_model,
    start,
    wait_until,
    weights_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.checkpointing.integrity import seal

STEPS = 8
SLOW_REWARD = """
import time

def odd(prompt, response, reference):
    time.sleep(0.01)
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_data(tmp_path_factory.mktemp("data"))
    (folder / "rewards.py").write_text(SLOW_REWARD)  # a step takes long enough for a signal to hit the run
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted GRPO run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(grpo(model, data, folder, steps=STEPS)) == 0
    return folder


def assert_goes_on_as_if_nothing_had_happened(arguments: list[str], folder: Path, whole: Path) -> None:
    assert run(arguments) == 0
    assert results_of(folder) == results_of(whole)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(whole / f"step_{STEPS}")


@pytest.mark.invariant
@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGTERM, 85), (signal.SIGHUP, 85), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_end_of_the_step_and_the_run_resumes_exactly(
    sent: signal.Signals, exit_code: int, model: Path, data: Path, whole: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = [*grpo(model, data, folder, steps=STEPS), "checkpointing.save_period=100"]
    process = start(arguments, log)
    assert wait_until(lambda: count_rows(folder) >= 1, process)
    # A terminal sends Ctrl-C to everybody in the foreground: the processes that compute rewards must not stumble over
    # it.
    os.killpg(process.pid or 0, sent)
    process.join()
    assert process.exitcode == exit_code, log.read_text()
    assert f"{sent.name} received" in log.read_text()
    last = rows_of(folder)[-1]["step"]
    assert last < STEPS
    assert [path.name for path in folder.glob("*step_*")] == [f"step_{last}"]
    assert f"{sent.name} after step {last}, saved" in log.read_text()
    assert all(row["train/unscored"] == 0 for row in rows_of(folder))
    assert_goes_on_as_if_nothing_had_happened(arguments, folder, whole)


def test_ctrl_c_does_not_wait_for_a_reward_that_hangs(model: Path, data: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    (tmp_path / "rewards.py").write_text(
        "import pathlib, time\ndef f(prompt, response, reference):\n"
        f"    pathlib.Path({str(tmp_path / 'asked')!r}).touch()\n    time.sleep(1000)\n"
    )
    process = start([*grpo(model, data, folder, reward=f"{tmp_path / 'rewards.py'}:f"), "env.mine.timeout_s=1000"], log)
    assert wait_until((tmp_path / "asked").exists, process)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(300)
    assert process.exitcode == 130
    assert "before the first step was finished" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not list(folder.glob("step_*"))


def test_sigterm_without_checkpoints_does_not_claim_to_have_saved(model: Path, data: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start([*grpo(model, data, folder), "checkpointing.enabled=false"], log)
    assert wait_until(lambda: count_rows(folder) >= 1, process)
    process.terminate()
    process.join()
    assert process.exitcode == 143
    assert "not saved" in log.read_text()


def test_more_steps_continue_a_finished_run(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(grpo(model, data, folder, steps=4)) == 0
    assert_goes_on_as_if_nothing_had_happened(grpo(model, data, folder, steps=STEPS), folder, whole)


def test_a_torn_checkpoint_is_reported_and_the_one_before_it_is_used(
    model: Path, data: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / f"step_{STEPS}" / "policy" / "optimizer" / "optim" / ".metadata").unlink()
    with (folder / f"step_{STEPS - 2}" / "policy" / "weights" / "model" / "model.safetensors").open("r+b") as weights:
        weights.seek(2000)
        weights.write(b"\xff\x00\xff\x00")  # the size stays right
    log = tmp_path / "log"
    process = start(grpo(model, data, folder, steps=STEPS), log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    lines = log.read_text().splitlines()
    damaged = [line for line in lines if line.startswith("Skipping damaged checkpoint")]
    assert len(damaged) == 2
    assert f"step_{STEPS}: " in damaged[0]
    assert ".metadata" in damaged[0]
    assert f"step_{STEPS - 2}: " in damaged[1]
    assert "model.safetensors" in damaged[1]
    assert any(line.startswith("Resuming from") and line.endswith(f"after step {STEPS - 4}") for line in lines)
    assert results_of(folder) == results_of(whole)
    assert weights_of(folder / f"step_{STEPS}") == weights_of(whole / f"step_{STEPS}")


def test_resuming_a_prepared_checkpoint_runs_no_code(
    model: Path, data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever prepared it has also written fitting checksums."""

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    checkpoint = folder / f"step_{STEPS}"
    for name in ("policy/optimizer/optim/.metadata", "policy/optimizer/schedule.pt", "train_dataloader.pt"):
        before = (checkpoint / name).read_bytes()
        if name.endswith(".pt"):
            torch.save(Hostile(), checkpoint / name)
        else:
            (checkpoint / name).write_bytes(pickle.dumps(Hostile()))
        seal(checkpoint)
        assert run(grpo(model, data, folder, steps=STEPS + 1)) == 64
        assert Path(name).name in capsys.readouterr().err
        assert not (tmp_path / "ran").exists()
        (checkpoint / name).write_bytes(before)


def test_bf16_runs_resume_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    """The fp32 masters are part of the checkpoint: rounding to bf16 and back would lose digits."""
    for name, steps in (("whole", [6]), ("stopped", [2, 6])):
        for max_steps in steps:
            arguments = dpo(model, data, tmp_path / name, steps=max_steps)
            assert run([*arguments, "policy.precision=bfloat16"]) == 0
    assert results_of(tmp_path / "stopped") == results_of(tmp_path / "whole")
    assert weights_of(tmp_path / "stopped" / "step_6") == weights_of(tmp_path / "whole" / "step_6")


@pytest.mark.parametrize("change", ["sizes.hidden_size: saved 32 != this run's 48", "lora: saved none"])
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
    change: str, data: Path, whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model(tmp_path / "other", hidden_size=48) if change.startswith("sizes") else model
    before = (whole / "metrics.jsonl").read_bytes()
    settings = LORA if change.startswith("lora") else []
    assert run([*grpo(other, data, whole), *settings, "--resume-with-changes"]) == 64
    message = capsys.readouterr().err
    assert change in message
    assert "checkpointing.checkpoint_dir" in message, "the remedy"
    assert "Traceback" not in message
    assert (whole / "metrics.jsonl").read_bytes() == before, "nothing of the other run is touched"


def test_other_data_in_the_same_folder_is_refused(
    model: Path, data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_data(tmp_path / "data")
    lines = (other / "questions.jsonl").read_text().splitlines(keepends=True)
    (other / "questions.jsonl").write_text("".join(lines[:-1]))
    reward = f"{data / 'rewards.py'}:odd"  # another file of rewards would be refused as a setting
    assert run(grpo(model, other, whole, reward=reward)) == 64
    assert "saved 22, now 21" in capsys.readouterr().err


def test_a_checkpoint_without_optimizer_cannot_be_resumed(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run([*dpo(model, data, folder, steps=2), "checkpointing.save_optimizer=false"]) == 0
    assert run(dpo(model, data, folder, steps=4)) == 64
    assert "checkpointing.save_optimizer" in capsys.readouterr().err


def test_keep_top_k_keeps_the_best_and_the_newest(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    accuracy = {row["step"]: row["validation/accuracy"] for row in results_of(whole) if "validation/accuracy" in row}
    highest = max(accuracy, key=lambda step: (accuracy[step], step))
    lowest = min(accuracy, key=lambda step: (accuracy[step], -step))
    higher, best = (True, highest) if highest != STEPS else (False, lowest)
    assert best != STEPS, "the best is to be another than the newest"
    arguments = [*grpo(model, data, folder, steps=STEPS), "checkpointing.keep_top_k=1"]
    assert run([*arguments, f"checkpointing.higher_is_better={str(higher).lower()}"]) == 0
    assert sorted(path.name for path in folder.glob("step_*")) == sorted({f"step_{best}", f"step_{STEPS}"})
    info = json.loads((folder / f"step_{best}" / "training_info.json").read_text())
    assert info["val:accuracy"] == accuracy[best]


def test_a_deadline_saves_and_ends_the_run(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*grpo(model, data, folder, steps=10_000), "checkpointing.save_period=10000", "grpo.val_period=0"]
    assert run([*arguments, "checkpointing.checkpoint_must_save_by='00:00:00:02'"]) == 0
    last = rows_of(folder)[-1]["step"]
    assert 1 <= last < 10_000
    assert [path.name for path in folder.glob("step_*")] == [f"step_{last}"]


def test_the_checkpoint_has_the_documented_tree(whole: Path, model: Path) -> None:
    checkpoint = whole / f"step_{STEPS}"
    parts = ["config.yaml", "training_info.json", "train_dataloader.pt"]
    for name in (*parts, "policy/weights", "policy/optimizer", "policy/tokenizer"):
        assert (checkpoint / name).exists(), name
    info = json.loads((checkpoint / "training_info.json").read_text())
    assert info["current_step"] == info["total_steps"] == STEPS
    assert info["consumed_samples"] == 4 * STEPS
    assert not list(whole.glob("tmp_*"))


def test_weights_and_tokenizer_load_with_transformers(whole: Path, model: Path) -> None:
    checkpoint = whole / f"step_{STEPS}" / "policy"
    tuned = AutoModelForCausalLM.from_pretrained(checkpoint / "weights" / "model")
    start_of_run = AutoModelForCausalLM.from_pretrained(model)
    assert tuned.dtype == torch.float32
    changed = [not torch.equal(a, b) for a, b in zip(tuned.parameters(), start_of_run.parameters(), strict=True)]
    assert all(changed), "every parameter has been trained"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template


def test_adapters_load_with_peft(model: Path, data: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = tmp_path / "run"
    assert run([*dpo(model, data, folder, steps=2), *LORA]) == 0
    base = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = base(tokens).logits.detach()
    adapted = PeftModel.from_pretrained(base, folder / "step_2" / "policy" / "weights" / "model")
    assert not torch.allclose(adapted(tokens).logits, before), "the adapters do something"
    with adapted.disable_adapter():
        assert torch.equal(adapted(tokens).logits, before), "the base weights are as they were"
