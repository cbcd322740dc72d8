"""A run that is killed with `kill -9`, again and again, and resumed by the same command, is the run that was never
killed.

Equal means equal bits: every number of training and validation in metrics.jsonl, every sampled text, the bytes of the
weights of every checkpoint. Whether checkpoints are written at once or in the background makes no difference either.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import (
    LORA,
    assert_resumes,
    command,
    count_rows,
    dpo,
    grpo,
    results_of,
    rm,
    rows_of,
    run,
    save_model,
    start,
    wait_until,
    weights_of,
)

STEPS, SAVE_PERIOD = 8, 2
IN_BACKGROUND = ["checkpointing.async_save=true"]
# Nothing of the state is in fp32: what rounds it by chance must come back too.
IN_FEW_BITS = [
    "policy.precision=bfloat16",
    "policy.optimizer.state_dtype=int8",
    "policy.optimizer.master_weights=none",
    "policy.optimizer.offload_states=true",
]
LORA_WITH_DROPOUT = [*LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.2"]  # its noise must come back too

Arguments = Callable[[Path], list[str]]  # run folder -> command line


@pytest.mark.invariant
@pytest.mark.parametrize("num_kills", [3, 10])
def test_killed_grpo_run_equals_uninterrupted_run(num_kills: int, model: Path, data: Path, tmp_path: Path) -> None:
    # The uninterrupted run is started as a user starts it; the killed ones are forked, which must make no difference.
    whole = tmp_path / "whole"
    finished = subprocess.run(command(grpo(model, data, whole, steps=STEPS)), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert len({row["train/reward"] for row in rows_of(whole) if "train/reward" in row}) == STEPS, "rewards vary"
    kill_and_compare(
        lambda folder: grpo(model, data, folder, steps=STEPS), whole, tmp_path, num_kills=num_kills, seed=1
    )


def test_killed_dpo_run_equals_uninterrupted_run(model: Path, data: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run(dpo(model, data, whole, steps=STEPS)) == 0
    assert len({row["train/loss"] for row in rows_of(whole) if "train/loss" in row}) == STEPS, "losses vary"
    kill_and_compare(lambda folder: dpo(model, data, folder, steps=STEPS), whole, tmp_path, num_kills=5, seed=2)

    def in_background(folder: Path) -> list[str]:
        return [*dpo(model, data, folder, steps=STEPS), *IN_BACKGROUND]

    # The run that was never killed wrote its checkpoints at once.
    torn = kill_and_compare(in_background, whole, tmp_path, num_kills=8, seed=4)
    assert torn >= 2, "some kills must interrupt a write in the background"


def test_killed_grpo_lora_run_with_dropout_equals_uninterrupted_run(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        return [*grpo(model, data, folder, steps=STEPS), *LORA_WITH_DROPOUT]

    whole = tmp_path / "whole"
    assert run(arguments(whole)) == 0
    kill_and_compare(lambda folder: [*arguments(folder), *IN_BACKGROUND], whole, tmp_path, num_kills=4, seed=3)


def test_low_precision_state_resumes_exactly_from_a_background_checkpoint(
    model: Path, data: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run([*dpo(model, data, whole, steps=STEPS), *IN_FEW_BITS]) == 0
    assert run([*dpo(model, data, resumed, steps=4), *IN_FEW_BITS, *IN_BACKGROUND]) == 0
    shutil.rmtree(resumed / "step_4")
    assert run([*dpo(model, data, resumed, steps=STEPS), *IN_FEW_BITS, *IN_BACKGROUND]) == 0
    assert results_of(resumed) == results_of(whole)
    for step in range(SAVE_PERIOD, STEPS + 1, SAVE_PERIOD):
        assert weights_of(resumed / f"step_{step}") == weights_of(whole / f"step_{step}")


@pytest.mark.parametrize("settings", [[], LORA_WITH_DROPOUT], ids=["all weights", "adapters with dropout"])
def test_a_reward_model_resumes_exactly(settings: list[str], model: Path, data: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run([*rm(model, data, whole, steps=STEPS), *settings]) == 0
    assert len({row["train/loss"] for row in rows_of(whole) if "train/loss" in row}) == STEPS, "losses vary"
    assert_resumes(lambda folder: [*rm(model, data, folder, steps=STEPS), *settings], whole, resumed, 6, STEPS)


SHORT = [
    "checkpointing.save_period=1",
    "grpo.val_period=0",
    "grpo.num_prompts_per_step=2",
    "policy.train_global_batch_size=4",
]


@pytest.mark.invariant
def test_ppo_resumes_exactly_with_its_critic(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        ppo = ["grpo.adv_estimator.name=gae", "value.optimizer.kwargs.lr=1e-2"]
        return [*grpo(model, data, folder, steps=2), *SHORT, *ppo]

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(arguments(whole)) == 0
    assert_resumes(arguments, whole, resumed, 2)
    of_critic = [sorted((folder / "step_2" / "critic").rglob("*.safetensors")) for folder in (whole, resumed)]
    assert [file.read_bytes() for file in of_critic[0]] == [file.read_bytes() for file in of_critic[1]] != []


@pytest.mark.invariant
def test_distillation_resumes_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    """Of sampled tokens, several updates a step, rewards beside them."""
    teacher = save_model(tmp_path / "teacher", hidden_size=48, seed=7)

    def arguments(folder: Path) -> list[str]:
        taught = f"teacher={{model_name: {teacher}, over: sampled, divergence: forward, reward_weight: 0.5}}"
        return [*grpo(model, data, folder, steps=2), *SHORT, taught]

    assert run(arguments(tmp_path / "whole")) == 0
    assert_resumes(arguments, tmp_path / "whole", tmp_path / "resumed", 2)


def kill_and_compare(arguments: Arguments, whole: Path, tmp_path: Path, *, num_kills: int, seed: int) -> int:
    """Kill runs at random moments, at least `num_kills` times in all, and go on each time by the same command. A run
    that gets to its end must equal `whole`, and is followed by a new one. Returns how many kills tore a checkpoint.
    """
    chance = random.Random(seed)
    folder = tmp_path / "killed"
    kills = num_resumed = num_finished = torn = 0
    while kills < num_kills or num_resumed < 3 or num_finished == 0:
        assert kills < 10 * num_kills, "runs are killed again and again before they have saved anything"
        log = tmp_path / f"log_{kills}_{num_finished}"
        enough = kills >= num_kills and num_resumed >= 3
        moments = ["start", "row", "while saving", "while writing", "after saving", "after saving"]
        moment = "never" if enough else chance.choice(moments)
        exit_code = run_and_kill(arguments(folder), folder, log, moment, chance)
        num_resumed += "Resuming from" in log.read_text()
        if exit_code is None:
            kills += 1
            torn += any(folder.glob("tmp_step_*"))
            continue
        assert exit_code == 0, log.read_text()
        assert_same_run(folder, whole)
        num_finished += 1
        shutil.rmtree(folder)
    return torn


def run_and_kill(arguments: list[str], folder: Path, log: Path, moment: str, chance: random.Random) -> int | None:
    """None if the run was killed, its exit code if it ended before."""
    began = time.time()
    hold = log.with_suffix(".hold")
    if moment.startswith("while"):
        hold.touch()  # the kill comes before the checkpoint is complete, however fast the disk is
    process = start(arguments, log, hold)

    def has_begun() -> bool:
        return "run folder" in log.read_text()  # what an earlier one left has been cut by now

    def has_new(pattern: str) -> bool:
        return any(_made_after(path, began) for path in folder.glob(pattern))

    if moment == "start":
        time.sleep(chance.uniform(0, 0.5))
    elif moment == "row":
        more = chance.randrange(1, 4)
        wait_until(has_begun, process)
        already = count_rows(folder)
        wait_until(lambda: count_rows(folder) >= already + more, process)
        time.sleep(chance.uniform(0, 0.1))
    elif moment == "while saving":
        wait_until(lambda: has_new("tmp_step_*"), process)
        time.sleep(chance.uniform(0, 0.03))
    elif moment == "while writing":  # in the background, while the run goes on with the next steps
        wait_until(lambda: has_new("tmp_step_*"), process)
        time.sleep(chance.uniform(0.03, 0.4))
    elif moment == "after saving":
        wait_until(lambda: has_new("step_*"), process)
        time.sleep(chance.uniform(0, 0.1))
    if moment != "never":
        process.kill()
    process.join()
    hold.unlink(missing_ok=True)
    assert process.exitcode is not None
    return None if process.exitcode < 0 else process.exitcode


def _made_after(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except FileNotFoundError:  # renamed meanwhile: the save is over
        return False


def assert_same_run(folder: Path, whole: Path) -> None:
    assert results_of(folder) == results_of(whole)
    assert [row["step"] for row in results_of(folder) if "train/loss" in row] == list(range(1, STEPS + 1))
    for step in range(SAVE_PERIOD, STEPS + 1, SAVE_PERIOD):
        if (folder / f"step_{step}").exists():  # one that was torn by a kill is written again, under the same name
            assert weights_of(folder / f"step_{step}") == weights_of(whole / f"step_{step}")
    assert weights_of(folder / f"step_{STEPS}") == weights_of(whole / f"step_{STEPS}")
    samples = {path.name: path.read_bytes() for path in (whole / "rollouts").glob("*")}
    assert {path.name: path.read_bytes() for path in (folder / "rollouts").glob("*")} == samples
