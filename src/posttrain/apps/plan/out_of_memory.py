"""The planner's advice for a run that ran out of GPU memory: its estimate, and settings that free memory in the failed
phase.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.measured import read_measured
from posttrain.apps.plan.plan import estimate_run
from posttrain.apps.plan.proposal import explain, savings
from posttrain.config import RunConfig
from posttrain.errors import InputError, OutOfGpuMemoryError
from posttrain.policy.memory.rank import GIB, OPTIMIZER, SAMPLING, SCORING, TRAINING

_PHASES = {
    "generate": (SAMPLING,),
    "sample_round": (SAMPLING,),
    "update": (TRAINING, OPTIMIZER),
    "logprobs": (SCORING,),
    "reference_logprobs": (SCORING,),
    "evaluate": (SCORING,),
}
_MOST_SHOWN = 4


def advice(config: RunConfig, error: OutOfGpuMemoryError, folder: Path) -> str:
    """Lines for the user; empty where the planner cannot count: an unknown model, or a GPU of unknown size.

    `folder` is the run's: the lengths that it has measured are used.
    """
    if not error.gpu_bytes:
        return ""
    like = min(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - error.gpu_bytes))
    try:
        lengths = read_measured(folder).lengths
    except InputError:
        lengths = None
    try:
        found = estimate_run(config, replace(like, memory_bytes=error.gpu_bytes), lengths=lengths)
    except InputError:
        return ""
    counted = ", ".join(f"{phase.name} {found.needed_bytes(phase) / GIB:.1f}" for phase in found.memory.phases)
    lines = [f"the planner counts, in GiB of {error.gpu_bytes / GIB:.1f}: {counted}"]
    if found.too_large:
        return "\n".join([*lines, explain(found)])
    used = found.workload.lengths
    lines.append(
        "  by its count this fits. Other processes may hold memory of the GPU (`nvidia-smi`), or sequences are longer than the "
        f"prompts of {used.prompt:.0f} and answers of {used.answer:.0f} tokens that it takes ({used.source})"
    )
    for words, freed_bytes in savings(found, _PHASES.get(error.stage, (OPTIMIZER,)))[:_MOST_SHOWN]:
        lines.append(f"  try {words}: {freed_bytes / GIB:.1f} GiB less")
    return "\n".join(lines)
