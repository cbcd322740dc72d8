"""Full GRPO steps that were measured on an H200 (docs/performance.md), and the planner's predictions."""

from __future__ import annotations

import pytest

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.plan import RunEstimate, estimate_run
from posttrain.config import load_config
from posttrain.policy.memory.peak_memory import GIB, SAMPLING, SCORING, TRAINING

SHORT_STATE = ("policy.optimizer.state_dtype=bfloat16", "policy.optimizer.master_weights=none")
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")
# Settings; seconds; GiB while sampling, computing log-probabilities, training. The last step was measured after the
# planner's constants had been chosen.
STEPS = {
    "8B, all weights": (
        ("llama-8b", 32, 32, 128, 772, 8192, 16384, *SHORT_STATE),
        121.3,
        (116.5, 62.7, 121.7),
    ),
    "8B, all weights, sampling in FP8": (
        ("llama-8b", 16, 32, 128, 772, 8192, 16384, *SHORT_STATE, "policy.generation.native_cfg.precision=fp8"),
        54.68,
        (102.1, 64.0, 122.6),
    ),
    "8B, all weights, training and sampling in FP8": (
        (
            *("llama-8b", 16, 32, 128, 772, 8192, 16384, *SHORT_STATE),
            "policy.fp8=true",
            "policy.generation.native_cfg.precision=fp8",
        ),
        43.66,
        (102.1, 70.6, 135.6),
    ),
    "8B, LoRA, training and sampling in FP8": (
        (
            *("llama-8b", 16, 32, 128, 772, 8192, 16384, *LORA),
            "policy.fp8=true",
            "policy.generation.native_cfg.precision=fp8",
        ),
        38.11,
        (57.52, 25.96, 61.20),
    ),
    "8B, LoRA": (("llama-8b", 16, 32, 128, 772, 8192, 16384, *LORA), 53.7, (71.9, 18.1, 45.7)),
    "1.5B, prompts of 1,024": (("llama-1.5b", 32, 16, 1024, 128, 8192, 16384), 3.66, (27.0, 30.2, 43.0)),
    "8B, LoRA, a context of 131,072": (
        ("llama-8b", 1, 8, 130560, 512, 135168, 135168, *LORA, "policy.dtensor_cfg.activation_checkpointing=true"),
        120.3,
        (33.15, 38.9, 122.4),
    ),
}


def planned(
    shape: str, prompts: int, samples: int, prompt: int, answer: int, train_row: int, score_row: int, *more: str
) -> RunEstimate:
    words = (
        f"policy.model_name={shape}",
        f"grpo.num_prompts_per_step={prompts}",
        f"grpo.num_generations_per_prompt={samples}",
        f"policy.train_global_batch_size={prompts * samples}",
        f"policy.max_total_sequence_length={prompt + answer}",
        f"policy.generation.max_new_tokens={answer}",
        "policy.generation.ignore_eos=true",
        "policy.generation.native_cfg.max_batch_size=512",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={train_row}",
        f"policy.sequence_packing.logprob_mb_tokens={score_row}",
        "loss_fn.reference_policy_kl_penalty=0.01",
        *more,
    )
    return estimate_run(load_config("grpo", None, list(words)).config, GPUS["h200"])


@pytest.mark.parametrize("name", STEPS)
def test_seconds_and_memory_are_predicted_within_15_percent(name: str) -> None:
    settings, seconds, peaks_gib = STEPS[name]
    plan = planned(*settings)
    assert plan.time.total_s == pytest.approx(seconds, rel=0.15)
    predicted = {phase.name: phase.peak_bytes / GIB for phase in plan.memory.phases}
    assert [predicted[phase] for phase in (SAMPLING, SCORING, TRAINING)] == pytest.approx(list(peaks_gib), rel=0.15)
