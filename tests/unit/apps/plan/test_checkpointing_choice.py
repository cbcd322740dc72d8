"""`policy.dtensor_cfg.activation_checkpointing: auto`, and the memory that a run reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.config import PolicyConfig, load_config
from posttrain.policy.memory.peak_memory import GIB, should_checkpoint
from posttrain.policy.parallel.mesh import Mesh
from posttrain.policy.runtime import PeakMemory
from posttrain.reporting.rows import Hardware, training_row
from posttrain.types import StepReport

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def policy(kind: str = "grpo", *words: str) -> PolicyConfig:
    config: PolicyConfig = load_config(
        kind, None, ["policy.dtensor_cfg.activation_checkpointing=auto", *words]
    ).config.policy
    return config


def chooses(policy: PolicyConfig, memory_gib: float, **options: Any) -> bool:
    given = {"has_reference": False, "ranks": 1, **options}
    return should_checkpoint(LLAMA_8B, policy, memory_bytes=int(memory_gib * GIB), **given)


def test_checkpointing_depends_on_free_memory() -> None:
    short = policy("grpo", "policy.optimizer.state_dtype=bfloat16", "policy.optimizer.master_weights=none",
                   "policy.sequence_packing.train_mb_tokens=8192")  # fmt: skip
    assert not chooses(short, 140)
    assert chooses(short, 100)
    assert chooses(short, 130, has_reference=True)
    assert not chooses(short, 100, ranks=8)


def test_checkpointing_depends_on_the_teacher() -> None:
    lora = policy("grpo", "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.sequence_packing.train_mb_tokens=8192")
    assert not chooses(lora, 80)
    assert chooses(lora, 80, teacher=LLAMA_8B)
    assert not chooses(lora, 110, teacher=LLAMA_8B)
    assert chooses(lora, 110, teacher={"model_type": "unknown"})


def test_checkpointing_depends_on_the_micro_batch() -> None:
    lora = ["policy.dtensor_cfg.lora_cfg.enabled=true"]
    assert not chooses(policy("grpo", *lora, "policy.sequence_packing.train_mb_tokens=8192"), 80)
    assert chooses(policy("grpo", *lora, "policy.sequence_packing.train_mb_tokens=32768"), 80)
    unpacked = ["policy.train_micro_batch_size=16", "policy.max_total_sequence_length=1024"]
    assert chooses(policy("dpo", *lora, *unpacked, "policy.train_global_batch_size=16"), 80)


def test_a_pair_stays_together_whatever_the_budget() -> None:
    long = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.max_total_sequence_length=16384"]
    long += ["policy.train_micro_batch_size=1"]
    budget = ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=16384"]
    packed = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=16384"]
    assert chooses(policy("dpo", *long), 120)
    assert chooses(policy("dpo", *long, *budget), 120)
    assert not chooses(policy("grpo", *long, *packed), 120)


def test_a_reward_model_has_no_output_table() -> None:
    words = ["policy.train_micro_batch_size=1", "policy.max_total_sequence_length=1024"]
    assert chooses(policy("rm", *words), 150)
    assert not chooses(policy("rm", *words), 150, scores_answers=True)


@pytest.mark.parametrize(
    "words",
    [
        [
            "policy.dtensor_cfg.lora_cfg.match_all_linear=false",
            "policy.dtensor_cfg.lora_cfg.target_modules=[q_proj,v_proj]",
        ],
        ["policy.dtensor_cfg.lora_cfg.match_all_linear=false"],
        ["policy.dtensor_cfg.lora_cfg.exclude_modules=[down_proj]"],
    ],
)
def test_adapters_on_some_layers_count_as_on_all(words: list[str]) -> None:
    lora = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.sequence_packing.train_mb_tokens=8192"]
    assert not chooses(policy("grpo", *lora, *words), 80)
    assert chooses(policy("grpo", *lora, *words), 40)


def test_unsupported_model_recomputes_activations() -> None:
    assert should_checkpoint({"model_type": "other"}, policy(), memory_bytes=10**15, has_reference=False, ranks=1)


def test_the_default_is_off_and_auto_is_accepted() -> None:
    assert load_config("grpo").config.policy.dtensor_cfg.activation_checkpointing is False
    assert policy().dtensor_cfg.activation_checkpointing == "auto"


def test_peaks_are_measured_on_a_gpu_only() -> None:
    memory = PeakMemory(torch.device("cpu"))
    with memory.during("training"):
        pass
    assert memory.take() == {}


def test_peaks_are_the_largest_since_they_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([3 * GIB, 5 * GIB, 4 * GIB])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    memory = PeakMemory(torch.device("cuda"))
    for phase in ("sampling", "training", "training"):
        with memory.during(phase):
            pass
    assert memory.take() == {"peak_gib_sampling_max": 3.0, "peak_gib_training_max": 5.0}
    assert memory.take() == {}


def test_memory_is_a_performance_metric() -> None:
    report = StepReport({"loss": 1.0, "peak_gib_training_max": 2.5}, {"policy_training": 1.0}, num_tokens=10)
    row = training_row(1, report, Hardware(1))
    assert row["performance/peak_gib_training_max"] == 2.5
    assert "train/peak_gib_training_max" not in row
    assert row["train/loss"] == 1.0


@pytest.mark.parametrize(
    ("device", "memory_gib", "expected"), [("cpu", 0, False), ("cuda", 40, True), ("cuda", 400, False)]
)
def test_worker_uses_the_estimate_on_a_gpu(
    device: str, memory_gib: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.policy import trainer

    class Properties:
        total_memory = int(memory_gib * GIB)

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA_8B

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(trainer, "base_config", lambda model: Config())
    rank = trainer.PolicyTrainer.__new__(trainer.PolicyTrainer)
    rank.device, rank.mesh, rank.model = torch.device(device), Mesh(), torch.nn.Module()
    setup = trainer.RankSetup(policy(), seed=0, needs_reference=False)
    assert rank._recomputes_activations(setup) is expected
