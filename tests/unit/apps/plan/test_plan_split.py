"""How `posttrain plan` splits GPUs between training and sampling."""

from __future__ import annotations

import json

import pytest

from posttrain.apps.plan import split
from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.plan import RunEstimate, estimate_run
from posttrain.apps.plan.split import Splits, find_splits, simulated_step_s
from posttrain.cli.main import main
from posttrain.config import GrpoRunConfig, load_config
from posttrain.policy.memory.peak_memory import OPTIMIZER, SAMPLING

STEP = [
    "policy.model_name=llama-8b",
    "cluster.gpus_per_node=8",
    "grpo.num_prompts_per_step=32",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=256",
    "policy.max_total_sequence_length=4224",
    "policy.generation.max_new_tokens=4096",
]
LENGTHS = ["--prompt-tokens", "128", "--answer-tokens", "700"]
FOUR_SAMPLE = ["policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4}}"]


def planned(*words: str) -> tuple[RunEstimate, GrpoRunConfig]:
    config = load_config("grpo", None, [*STEP, *words]).config
    assert isinstance(config, GrpoRunConfig)
    return estimate_run(config, GPUS["h200"], prompt_tokens=128, answer_tokens=700), config


@pytest.fixture(scope="module")
def splits() -> Splits:
    return find_splits(*planned())


def test_only_splits_that_a_run_accepts_are_tried(splits: Splits) -> None:
    tried = {(split.config.num_engines, split.max_age) for split in splits.others}
    assert {engines for engines, age in tried if age == 0} == set(range(8))
    assert {engines for engines, age in tried if age == 1} == {0, 1, 2, 4}, "those that divide 32 prompts"


def test_without_a_tail_nothing_is_gained_by_asynchronous_sampling_on_shared_gpus() -> None:
    found = find_splits(*planned("policy.generation.ignore_eos=true"))
    shared = {split.max_age: split.step_s for split in found.others if not split.config.num_engines}
    assert shared[1] >= 0.99 * shared[0]
    assert not found.proposed


def test_older_answers_make_steps_shorter_and_the_proposal_keeps_to_one_step(splits: Splits) -> None:
    shared = {split.max_age: split.step_s for split in splits.others if not split.config.num_engines}
    assert shared[0] > 1.1 * shared[1] > 1.1 * shared[2]
    assert splits.best is not None
    assert splits.best.max_age == 1
    assert splits.proposed == {"grpo.async_grpo.enabled": "true", "grpo.async_grpo.max_trajectory_age_steps": "1"}


def test_a_config_that_allows_older_answers_gets_proposals_of_that_age() -> None:
    words = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
    found = find_splits(*planned(*words))
    assert found.now.max_age == 2
    assert min(found.now.step_s, found.best.step_s if found.best else 1e9) < 0.8 * found.shared.step_s


def test_an_engine_holds_the_whole_model_and_no_optimizer() -> None:
    found, _ = planned(*FOUR_SAMPLE)
    items = {phase.name: phase.items for phase in found.memory.phases}
    assert items[SAMPLING]["weights"] == 2 * found.shape.num_weights
    assert "optimizer state" not in items[SAMPLING]
    assert items[OPTIMIZER]["optimizer state"] == 12 * found.shape.num_weights / 4
    assert "KV cache" not in items[OPTIMIZER], "of GPUs that only train"
    assert items[OPTIMIZER]["bucket for engines"] == 2**30


def test_gpus_that_share_an_engine_hold_parts_of_the_model_and_are_counted_as_one_engine() -> None:
    found, config = planned(*FOUR_SAMPLE, "policy.generation.vllm_cfg.tensor_parallel_size=2")
    items = {phase.name: phase.items for phase in found.memory.phases}
    assert items[SAMPLING]["weights"] == found.shape.num_weights, "two bytes each, on two GPUs"
    assert "whole weights" not in items[SAMPLING]
    tried = find_splits(found, config).others
    assert {split.config.num_engine_gpus for split in tried if split.max_age == 0} == {0, 2, 4, 6}
    assert {split.config.num_engines for split in tried if split.max_age == 0} == {0, 1, 2, 3}


def test_a_vllm_has_a_copy_of_the_weights_also_on_one_gpu_and_where_ranks_share_layers() -> None:
    vllm = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.python=/env/bin/python"]
    two_each = [*FOUR_SAMPLE, "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    for words, trained, own in (
        (["cluster.gpus_per_node=1"], 1, 1),
        (["policy.dtensor_cfg.tensor_parallel_size=2"], 1 / 8, 1),
        (FOUR_SAMPLE, 1, 1),  # the engine's process has them too
        (two_each, 1 / 2, 0),  # in host memory
    ):
        found, _ = planned(*words, *vllm)
        items = next(phase.items for phase in found.memory.phases if phase.name == SAMPLING)
        weights = 2 * found.shape.num_weights
        assert (items["weights"], items.get("weights of vLLM", 0)) == (trained * weights, own * weights)
        assert "whole weights" not in items


def test_every_rank_has_a_vllm_also_where_ranks_share_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[int] = []
    monkeypatch.setattr(split, "simulate", lambda engines, *rest, **named: simulated.append(len(engines)) or [1.0])
    vllm = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.python=/env/bin/python"]
    for words in ([], vllm):
        found, config = planned("policy.dtensor_cfg.tensor_parallel_size=2", *words)
        simulated_step_s(found, config)
    assert simulated == [4, 8]


def test_rounds_ahead_take_the_slower_of_the_two_sides() -> None:
    words = [*FOUR_SAMPLE, "policy.generation.ignore_eos=true"]
    ahead, config = planned(*words, "grpo.async_grpo.enabled=true")
    by_turns, plain = planned(*words)
    hidden = simulated_step_s(by_turns, plain) - simulated_step_s(ahead, config)
    trained = ahead.time.logprobs_s + ahead.time.training_s
    assert hidden == pytest.approx(min(trained, ahead.time.generation_s), rel=1e-6)


def test_rewards_that_a_run_measured_are_part_of_every_step() -> None:
    found, config = planned()
    assert simulated_step_s(found, config, 3.0) == pytest.approx(simulated_step_s(found, config) + 3.0)


def test_the_command_shows_splits_and_what_they_assume(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", *STEP, *LENGTHS]) == 0
    shown = capsys.readouterr().out
    assert "split of 8 GPUs between training and sampling, simulated" in shown
    assert "grpo.async_grpo.max_trajectory_age_steps=1" in shown
    assert "trains on answers that are up to one step old" in shown
    assert "weights reach engines through host memory at 50 GB/s" in shown
    assert main(["plan", "grpo", *STEP, *LENGTHS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["split"]
    assert found["proposal"]["grpo.async_grpo.enabled"] == "true"
    wanted = {"num_trainers": 4, "num_engines": 4, "max_age": 1}
    assert any(wanted.items() <= split.items() for split in found["splits"])


def test_the_cost_of_an_asynchronous_run_is_that_of_its_simulated_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "grpo", *STEP, *LENGTHS, "grpo.async_grpo.enabled=true", "--gpu-hour-price", "1", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"]["step_s"] == found["split"]["splits"][0]["step_s"] < found["seconds"]["total_step_time"]


def test_one_gpu_has_no_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy.dtensor_cfg.lora_cfg.enabled=true", "cluster.gpus_per_node=1"]
    assert main(["plan", "grpo", *STEP, *LENGTHS, *words]) == 0
    assert "split of" not in capsys.readouterr().out
