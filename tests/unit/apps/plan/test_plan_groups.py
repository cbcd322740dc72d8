"""Worker groups on GPUs of their own in `posttrain plan`: where they are, and what they need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.groups import planned_groups, proposed_placement
from posttrain.apps.plan.plan import estimate_run
from posttrain.cli.main import main
from posttrain.config import RunConfig, load_config
from posttrain.policy.memory.peak_memory import GIB

STEP = ["policy.model_name=llama-8b", "cluster.gpus_per_node=8", "data.default.env_name=math"]
STEP += ["grpo.num_prompts_per_step=32", "grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=256"]
REFERENCE = ["policy.reference.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
REWARD = [
    "data.default.env_name=rm",
    "env.rm={type: reward_model, model_name: llama-8b, resources: {gpus_per_node: 1}}",
]


def config_of(*words: str) -> RunConfig:
    config = load_config("grpo", None, [*STEP, *words]).config
    assert isinstance(config, RunConfig)
    return config


def test_a_placed_reference_leaves_the_gpus_that_train_and_needs_its_weights_on_its_own() -> None:
    config = config_of(*REFERENCE, *REWARD)
    found = estimate_run(config, GPUS["h200"])
    assert all("reference" not in phase.items for phase in found.memory.phases)
    assert not any(phase.name == "logprobs" for phase in found.memory.phases)
    groups = {group.name: group for group in planned_groups(found, config)}
    assert {name: group.gpus for name, group in groups.items()} == {
        "policy": {1: 6},
        "reference": {1: 1},
        "reward_rm": {1: 1},
    }
    weights = 2 * 8.03e9
    for name in ("reference", "reward_rm"):
        assert weights - 2 * GIB < (groups[name].needed_bytes or 0) < 2 * weights
    assert planned_groups(estimate_run(config_of(), GPUS["h200"]), config_of()) == []


def test_a_placement_is_proposed_where_only_the_reference_is_too_much() -> None:
    compact = [f"policy.optimizer.{name}" for name in ("state_dtype=int8", "master_weights=none")]
    compact += ["policy.dtensor_cfg.activation_checkpointing=true", "policy.train_micro_batch_size=1"]
    native = {"kv_cache_gib": 1, "max_batch_size": 16, "max_prefill_tokens": 1024}
    compact += [f"policy.generation.native_cfg.{name}={value}" for name, value in native.items()]
    now, apart = config_of(*compact), config_of(*compact, *REFERENCE)
    sizes = [estimate_run(config, GPUS["h200"]).most_gib for config in (now, apart)]
    assert sizes[1] < sizes[0]
    between = replace(GPUS["h200"], memory_bytes=int(sum(sizes) / 2 * GIB))
    key = "policy.reference.colocated"
    words = [f"{key}.enabled=false", f"{key}.resources.gpus_per_node=1"]
    assert proposed_placement(estimate_run(now, between), now) == words
    assert proposed_placement(estimate_run(now, GPUS["h200"]), now) == []


def test_the_command_shows_who_is_where(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "grpo", *STEP, *REFERENCE, *REWARD[:1], REWARD[1].replace("llama-8b", "not/here")]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["placement"]
    assert [(row["name"], row["needed_bytes"] is None) for row in rows] == [
        ("policy", False),
        ("reference", False),
        ("reward_rm", True),
    ]
