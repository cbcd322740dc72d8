"""What the planner counts of the models beside the policy: the teacher of distillation, the critic of PPO."""

from __future__ import annotations

import pytest

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.plan import RunEstimate, assumptions, estimate_run
from posttrain.apps.plan.timing import TimeModel
from posttrain.config import GrpoRunConfig, load_config
from posttrain.errors import InputError
from posttrain.policy.memory.layer_bytes import Pass
from posttrain.policy.memory.model_shape import NAMED_SHAPES
from posttrain.policy.memory.peak_memory import GIB

LORA = ["policy.model_name=llama-8b", "policy.dtensor_cfg.lora_cfg.enabled=true", "kl=0"]
LIVE = {"vocabulary": 7, "top_k": 5, "sampled": 4}  # numbers of each logit, counted operation by operation
LARGE = 2 * NAMED_SHAPES["llama-70b"].num_weights  # bytes in bf16


def config_of(kind: str, *words: str) -> GrpoRunConfig:
    config: GrpoRunConfig = load_config(kind, None, list(words)).config
    return config


def plan(kind: str, *words: str) -> RunEstimate:
    return estimate_run(config_of(kind, *words), GPUS["h200"])


def test_a_teacher_is_held_in_every_phase() -> None:
    alone, taught = plan("grpo", *LORA), plan("distill", *LORA, "teacher=llama-70b")
    assert {phase.items["teacher"] for phase in taught.memory.phases} == {LARGE}
    assert round(LARGE / GIB) == 131
    assert {phase.name for phase in taught.too_large} == {phase.name for phase in taught.memory.phases}
    assert not alone.too_large
    words = [*LORA, "teacher=llama-70b", "cluster.gpus_per_node=8"]
    assert {phase.items["teacher"] for phase in plan("distill", *words).memory.phases} == {LARGE / 8}
    assert any("70.6 billion" in line for line in assumptions(taught, config_of("distill", *words)))


def test_logits_are_compared_in_chunks_of_a_quarter() -> None:
    found = {over: plan("distill", *LORA, "teacher=llama-8b", f"teacher.over={over}") for over in LIVE}
    row = Pass(5000, 5000, 0, 0)
    chunks = {over: one.rank.layer.compared(row, NAMED_SHAPES["llama-8b"]) for over, one in found.items()}
    assert chunks == {over: live * 4 * 128256 * (2**30 // (4 * 128256)) for over, live in LIVE.items()}
    assert found["sampled"].time.passes_s < found["top_k"].time.passes_s < found["vocabulary"].time.passes_s


def test_the_teacher_is_asked_once_in_every_pass_of_training() -> None:
    alone, taught = plan("grpo", *LORA), plan("distill", *LORA, "teacher=llama-70b")
    teacher = taught.rank.teacher
    assert teacher is not None
    row, count = taught.workload.passes(taught.workload.train, None)
    forward = count * TimeModel(teacher, GPUS["h200"]).forward_s(row)
    assert taught.time.passes_s - alone.time.passes_s > forward
    assert taught.time.passes_s - alone.time.passes_s < 1.3 * forward
    products = 2 * (teacher.shape.layer_products + teacher.shape.head_products) / GPUS["h200"].matrix_flops
    assert forward > products * row.tokens * count * 0.9


def test_auto_recomputes_activations_for_a_teacher() -> None:
    words = [*LORA, "policy.dtensor_cfg.activation_checkpointing=auto", "policy.sequence_packing.train_mb_tokens=16384"]
    words += ["policy.generation.native_cfg.gpu_memory_utilization=0.8", "gpus=2"]
    assert not plan("grpo", *words).settings.checkpointing
    assert plan("distill", *words, "teacher=llama-70b").settings.checkpointing


def test_a_critic_has_its_own_size_and_no_output_layer() -> None:
    words = ["policy.model_name=llama-1.5b", "kl=0"]
    own, small, large = (plan("ppo", *words, f"value.model_name={name}") for name in ("null", "llama-0.5b", "llama-8b"))
    shapes = [NAMED_SHAPES[name] for name in ("llama-1.5b", "llama-0.5b", "llama-8b")]
    for found, shape in zip((own, small, large), shapes, strict=True):
        weights = shape.without_output_table().num_weights
        assert found.memory.phases[0].items["critic"] == (2 + 3 * 4) * weights  # bf16; masters and moments in fp32
    assert small.time.passes_s < own.time.passes_s < large.time.passes_s
    assert small.time.optimizer_s < own.time.optimizer_s < large.time.optimizer_s
    gradients = [next(p for p in one.memory.phases if p.name == "optimizer").items["gradients"] for one in (own, large)]
    assert gradients == [4 * shapes[0].num_weights, 4 * shapes[2].without_output_table().num_weights]


def test_a_model_that_is_not_there_is_named_by_its_field() -> None:
    with pytest.raises(InputError, match=r"teacher\.model_name: .*no folder 'nowhere'"):
        plan("distill", *LORA, "teacher=nowhere")
    with pytest.raises(InputError, match=r"value\.model_name: .*no folder 'nowhere'"):
        plan("ppo", *LORA, "value.model_name=nowhere")
