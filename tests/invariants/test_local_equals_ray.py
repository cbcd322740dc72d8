"""One algorithm, any number of machines: the same config gives the same curves in this process and on one or two Ray
actors, and a checkpoint of one goes on with the other.

In float32, up to rounding: ranks add gradients up in another order than one process does.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_runs import (
    LORA,
    assert_same_curves,
    copy_until,
    count_rows,
    dpo,
    grpo,
    recorded,
    results_of,
    rm,
    rows_of,
    run,
    save_model,
    start,
    wait_until,
    weights_of,
)
from transformers import AutoModelForCausalLM

from posttrain.cli.main import main

ray = pytest.importorskip("ray", reason="Ray is not installed (posttrain[ray])")

STEPS = 6
LOCAL = ["cluster.launcher=local"]
ON_ONE = ["cluster.launcher=ray", "cluster.gpus_per_node=1"]
ON_TWO = ["cluster.launcher=ray", "cluster.gpus_per_node=2"]
IN_BACKGROUND = ["checkpointing.async_save=true"]
# With one validation prompt the second rank has nothing to sample, and must take part all the same.
# With the usual eps, Adam moves weights whose gradient is nearly 0 by the sign of its rounding error.
GRPO_SETTINGS = ["grpo.max_val_samples=1", "policy.optimizer.kwargs.eps=1e-4"]

pytestmark = pytest.mark.ray


def test_ray_workers_use_the_cpu_kernels_of_the_driver() -> None:
    """ATEN_CPU_CAPABILITY reaches them, so that `make invariants` compares like with like."""

    @ray.remote
    def capability() -> str:
        import torch  # in the worker: the module cannot be sent there

        return torch.backends.cpu.get_cpu_capability()

    assert ray.get(capability.remote()) == torch.backends.cpu.get_cpu_capability()


@torch.no_grad()
def assert_converts(folder: Path, model: Path, step: int) -> None:
    """What two ranks saved becomes a folder that plain transformers loads, with the logits of the checkpoint."""
    checkpoint = folder / f"step_{step}"
    assert len(list((checkpoint / "policy/optimizer/optim").glob("*.distcp"))) == 2
    assert main(["convert", str(checkpoint), "--to", str(folder / "hf"), "--merge-lora"]) == 0
    weights, prompt = checkpoint / "policy/weights/model", torch.tensor([[5, 9, 200, 17, 3]])
    adapted = (weights / "adapter_config.json").exists()
    trained = AutoModelForCausalLM.from_pretrained(model if adapted else weights)
    if adapted:
        trained = PeftModel.from_pretrained(trained, str(weights))
    found = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()(prompt).logits
    torch.testing.assert_close(found, trained.eval()(prompt).logits, rtol=5e-4, atol=5e-4)


def test_rounds_on_two_ranks_resume_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        rounds = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *GRPO_SETTINGS, *ON_TWO, *rounds]

    assert run(arguments("whole")) == 0
    ages = [row.get("train/trajectory_age_max", 0) for row in results_of(tmp_path / "whole")]
    assert 0 < max(ages) <= 2
    copy_until(2, tmp_path / "whole", tmp_path / "resumed")
    assert run(arguments("resumed")) == 0
    assert results_of(tmp_path / "resumed") == results_of(tmp_path / "whole")
    assert weights_of(tmp_path / f"resumed/step_{STEPS}") == weights_of(tmp_path / f"whole/step_{STEPS}")


def test_grpo_is_independent_of_the_number_of_actors(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=STEPS), *GRPO_SETTINGS]

    for name, where in (("local", LOCAL), ("one", ON_ONE), ("two", [*ON_TWO, *IN_BACKGROUND])):
        assert run([*arguments(name), *where]) == 0
    rows = [row for row in results_of(tmp_path / "local") if "train/loss" in row]
    assert len({row["train/reward"] for row in rows}) == STEPS, "a curve that does not move shows nothing"
    assert_same_curves(tmp_path / "one", tmp_path / "local")
    assert_same_curves(tmp_path / "two", tmp_path / "local")

    # Two ranks wrote it, one process goes on; and the other way round.
    copy_until(2, tmp_path / "two", tmp_path / "two_then_one")
    assert run([*arguments("two_then_one"), *LOCAL]) == 0
    assert_same_curves(tmp_path / "two_then_one", tmp_path / "local")
    copy_until(2, tmp_path / "local", tmp_path / "one_then_two")
    assert run([*arguments("one_then_two"), *ON_TWO]) == 0
    assert_same_curves(tmp_path / "one_then_two", tmp_path / "local")

    weights = Path(f"step_{STEPS}", "policy", "weights", "model")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "local" / weights)
    for name in ("two", "two_then_one", "one_then_two"):
        together = AutoModelForCausalLM.from_pretrained(tmp_path / name / weights)
        for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # an update moves a weight by up to 1e-2
    assert_converts(tmp_path / "two", model, STEPS)


def test_grpo_is_the_same_on_actors_that_share_layers_and_on_actors_that_share_rows(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", num_kv_heads=2)
    share_layers = [*ON_TWO, "policy.dtensor_cfg.tensor_parallel_size=2"]
    share_rows = [*ON_TWO, "policy.dtensor_cfg.context_parallel_size=2"]

    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=4), *GRPO_SETTINGS]

    assert run([*arguments("local"), *LOCAL]) == 0
    assert run([*arguments("layers"), *share_layers, *IN_BACKGROUND]) == 0
    assert_same_curves(tmp_path / "layers", tmp_path / "local")
    copy_until(2, tmp_path / "layers", tmp_path / "layers_then_rows")
    assert run([*arguments("layers_then_rows"), *share_rows]) == 0
    assert_same_curves(tmp_path / "layers_then_rows", tmp_path / "local")
    assert_converts(tmp_path / "layers", model, 4)
    # What cannot be split is named, with the exit code of wrong input.
    one_kv_head = save_model(tmp_path / "one_kv_head")
    assert run([*grpo(one_kv_head, data, tmp_path / "refused"), *share_layers]) == 64
    assert "tensor_parallel_size = 2 does not divide the model's num_key_value_heads = 1" in capsys.readouterr().err


def test_recorded_groups_are_independent_of_the_number_of_actors(model: Path, data: Path, tmp_path: Path) -> None:
    mixed = ["grpo.num_recorded_per_prompt=2", "policy.train_global_batch_size=10"]
    assert run([*recorded(model, data, tmp_path / "local", *mixed, steps=3), *LOCAL]) == 0
    assert run([*recorded(model, data, tmp_path / "two", *mixed, steps=3), *ON_TWO]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "local")


def test_dpo_is_independent_of_the_number_of_actors(model: Path, data: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        return dpo(model, data, tmp_path / name, steps=STEPS)

    for name, where in (("local", LOCAL), ("one", [*ON_ONE, *IN_BACKGROUND]), ("two", [*ON_TWO, *IN_BACKGROUND])):
        assert run([*arguments(name), *where]) == 0
    assert_same_curves(tmp_path / "one", tmp_path / "local")
    assert_same_curves(tmp_path / "two", tmp_path / "local")
    assert not list(tmp_path.glob("*/step_*/rank_*")), "what ranks leave for the driver is no part of a checkpoint"
    copy_until(2, tmp_path / "two", tmp_path / "two_then_one")
    assert run([*arguments("two_then_one"), *LOCAL]) == 0
    assert_same_curves(tmp_path / "two_then_one", tmp_path / "local")


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapters"])
def test_reward_model_is_independent_of_the_number_of_actors(
    adapted: bool, model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*rm(model, data, tmp_path / name, steps=4), *(LORA if adapted else [])]

    assert run([*arguments("local"), *LOCAL]) == 0
    copy_until(2, tmp_path / "local", tmp_path / "two")
    assert run([*arguments("two"), *ON_TWO]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "local")
    shutil.rmtree(tmp_path / "local" / "step_4")  # what two ranks have written, one process reads
    shutil.copytree(tmp_path / "two" / "step_4", tmp_path / "local" / "step_4")
    assert run([*rm(model, data, tmp_path / "local", steps=5), *(LORA if adapted else []), *LOCAL]) == 0


@pytest.mark.invariant
@pytest.mark.parametrize("adapters", [[], LORA], ids=["all weights", "adapters"])
def test_a_run_of_one_process_continues_on_two_actors(
    adapters: list[str], model: Path, data: Path, tmp_path: Path
) -> None:
    def arguments(name: str) -> list[str]:
        return [*grpo(model, data, tmp_path / name, steps=4), *adapters, *GRPO_SETTINGS]

    assert run([*arguments("local"), *LOCAL]) == 0
    copy_until(2, tmp_path / "local", tmp_path / "two")
    assert run([*arguments("two"), *ON_TWO]) == 0
    assert_same_curves(tmp_path / "two", tmp_path / "local")

    tokens = torch.tensor([[5, 6, 7, 8]])
    logits = {}
    for name in ("local", "two"):
        weights = tmp_path / name / "step_4" / "policy" / "weights" / "model"
        trained = AutoModelForCausalLM.from_pretrained(model if adapters else weights)
        logits[name] = (PeftModel.from_pretrained(trained, weights) if adapters else trained)(tokens).logits.detach()
    torch.testing.assert_close(logits["two"], logits["local"], rtol=1e-3, atol=1e-4)
    assert_converts(tmp_path / "two", model, 4)


def test_int8_optimizer_state_is_independent_of_sharding(model: Path, data: Path, tmp_path: Path) -> None:
    """Blocks lie within rows and noise is keyed by the number's place, so two ranks round as one process does. Weights
    in fp32: then the only rounding is that of the state, and gradients that differ in the last bit rarely tip it.
    """

    def arguments(name: str) -> list[str]:
        return [*dpo(model, data, tmp_path / name, steps=4), "policy.optimizer.state_dtype=int8"]

    assert run([*arguments("local"), *LOCAL]) == 0
    assert run([*arguments("two"), *ON_TWO, *IN_BACKGROUND]) == 0
    copy_until(2, tmp_path / "two", tmp_path / "two_then_one")
    assert run([*arguments("two_then_one"), *LOCAL]) == 0
    losses = {
        name: [row["train/loss"] for row in results_of(tmp_path / name) if "train/loss" in row]
        for name in ("local", "two", "two_then_one")
    }
    assert losses["two"] == pytest.approx(losses["local"], rel=1e-3)
    assert losses["two_then_one"] == pytest.approx(losses["local"], rel=1e-3)


def test_sigterm_saves_a_checkpoint_under_ray(model: Path, data: Path, tmp_path: Path) -> None:
    """With a Ray of its own, as a user's run has. It goes on in one process, on the same curve."""
    folder, log = tmp_path / "run", tmp_path / "log"

    def arguments(run: Path, steps: int) -> list[str]:
        return [*dpo(model, data, run, steps=steps), "policy.scheduler=null"]  # by default it depends on the steps

    process = start([*arguments(folder, 200), *ON_ONE], log)
    assert wait_until(lambda: count_rows(folder) >= 2, process), log.read_text()
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join()
    assert process.exitcode == 85, log.read_text()
    last = rows_of(folder)[-1]["step"]
    assert last < 200
    assert (folder / f"step_{last}").is_dir()

    longer = last + 3
    assert run([*arguments(folder, longer), *LOCAL]) == 0
    assert run([*arguments(tmp_path / "whole", longer), *LOCAL]) == 0
    assert_same_curves(folder, tmp_path / "whole")


def test_input_errors_of_ranks_are_reported_like_others(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["lora_cfg.match_all_linear=false", "lora_cfg.target_modules=[wq]"]
    arguments = [*dpo(model, data, tmp_path / "run"), *LORA, *(f"policy.dtensor_cfg.{target}" for target in targets)]
    assert run([*arguments, *ON_ONE]) == 64
    message = capsys.readouterr().err
    assert "policy.dtensor_cfg.lora_cfg" in message
    assert "wq" in message
    assert "File " not in message, "the remote traceback is for us, not for the user"
