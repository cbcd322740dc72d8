"""Whether a worker recomputes activations, where `policy.dtensor_cfg.activation_checkpointing` is `auto`.

Asked by each rank for itself once the model is there. The largest micro-batch that the settings allow is counted as full. The
answer changes memory and time, and no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config import PolicyConfig
from posttrain.planning.calibration import CALIBRATION, GPUS
from posttrain.planning.memory import KEPT_CACHE_SHARE, MemoryModel
from posttrain.planning.settings import run_settings
from posttrain.planning.shape import UnknownModelError, shape_of_config
from posttrain.planning.workload import Pass

_HEADROOM = 0.05  # of the memory: a count is not a measurement
_COPIES_OF_KEYS = 2.0  # keys that attention is given for each token, where answers share their prompt


def should_checkpoint(
    model_config: Mapping[str, Any],
    policy: PolicyConfig,
    *,
    memory_bytes: int,
    has_reference: bool,
    ranks: int,
    scores_answers: bool = False,
) -> bool:
    """True where activations would not fit beside the rest, and where the model is of a kind that cannot be counted."""
    try:
        shape = shape_of_config(policy.model_name, model_config)
    except UnknownModelError:
        return True
    if scores_answers:
        shape = shape.without_output_table()
    settings = run_settings(
        policy, has_reference=has_reference, ranks=ranks, scores_answers=scores_answers, checkpointing=False
    )
    model = MemoryModel(shape, settings, GPUS["h200"], CALIBRATION)
    tokens = float(_largest_micro_batch(policy))
    row = Pass(tokens, tokens, _COPIES_OF_KEYS * tokens, 0.0)
    cache = {"KV cache": KEPT_CACHE_SHARE * memory_bytes} if settings.engine is not None else {}
    phase = model.training_phase(row, cache, accumulates=True)
    return model.needed_bytes(phase.peak_bytes) > (1 - _HEADROOM) * memory_bytes


def _largest_micro_batch(policy: PolicyConfig) -> int:
    # A pair is two answers, which stay together whatever the budget; where nothing is sampled it may be one.
    per_sample = 1 if policy.generation is not None else 2
    longest = per_sample * policy.max_total_sequence_length
    for section in (policy.dynamic_batching, policy.sequence_packing):
        if section.enabled and section.train_mb_tokens:
            return max(section.train_mb_tokens, longest)
    return policy.train_micro_batch_size * longest
