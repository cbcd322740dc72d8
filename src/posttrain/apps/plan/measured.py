"""Compares what a run measured with the planner's prediction: stages, tokens per second, peak memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.plan.plan import RunEstimate
from posttrain.apps.plan.workload import MeanLengths
from posttrain.errors import InputError
from posttrain.policy.memory.peak_memory import GIB, OPTIMIZER, SAMPLING, SCORING, TRAINING
from posttrain.reporting.run_data import load_run
from posttrain.reporting.run_files import METRICS_FILE

# The names under which a run reports memory (policy/runtime.py), and the phases that each covers.
_PEAKS = {"sampling": (SAMPLING,), "logprobs": (SCORING,), "training": (TRAINING, OPTIMIZER)}
_ANSWER_SHARE = 0.5  # of a sequence, where a run does not log the length of answers


@dataclass(frozen=True)
class Measured:
    """Medians over steps."""

    num_steps: int
    values: dict[str, float]  # by key of metrics.jsonl
    is_on_gpu: bool = True

    def get(self, key: str) -> float | None:
        return self.values.get(key)

    @property
    def lengths(self) -> MeanLengths | None:
        total = self.get("performance/mean_total_tokens_per_sample")
        if total is None:
            return None
        answer = self.get("train/mean_generation_length")
        if answer is None:
            return MeanLengths(
                total * (1 - _ANSWER_SHARE), total * _ANSWER_SHARE, "of the run; answers taken as half of it"
            )
        return MeanLengths(max(total - answer, 1.0), max(answer, 1.0), "of the run")


@dataclass(frozen=True)
class PredictedAndMeasured:
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Share of the measured value by which the prediction is too high."""
        return self.predicted / self.measured - 1


def read_measured(folder: Path) -> Measured:
    """The first step is left out if there are others: it compiles kernels and captures CUDA graphs."""
    if not (folder / METRICS_FILE).is_file():
        raise InputError(
            f"--run {folder}: no {METRICS_FILE} there; give the folder of a run (checkpointing.checkpoint_dir)"
        )
    run = load_run(folder)
    rows = [row for row in run.rows if row.get("timing/train/total_step_time")]
    if not rows:
        raise InputError(f"--run {folder}: {METRICS_FILE} has no training step yet")
    used = rows[1:] or rows
    values: dict[str, list[float]] = {}
    for row in used:
        for key, value in row.items():
            if key != "step" and value is not None:
                values.setdefault(key, []).append(value)
    medians = {key: float(statistics.median(found)) for key, found in values.items()}
    return Measured(len(used), medians, run.info.get("device_word", "GPU") == "GPU")


def compare(found: RunEstimate, measured: Measured) -> list[PredictedAndMeasured]:
    """Quantities that both have. A measured step has more stages; the total is over the common ones."""
    rows = []
    shared_s = 0.0
    for stage, seconds in found.time.stages.items():
        value = measured.get(f"timing/train/{stage}")
        if value and seconds:
            shared_s += value
            rows.append(PredictedAndMeasured(stage, "s", seconds, value))
    if shared_s:
        rows.append(PredictedAndMeasured("these stages together", "s", sum(row.predicted for row in rows), shared_s))
    rate = measured.get("performance/tokens_per_sec_per_gpu")
    if rate:
        rows.append(PredictedAndMeasured("tokens per second and GPU", "", found.tokens_per_s, rate))
    for name, phases in _PEAKS.items():
        value = measured.get(f"performance/peak_gib_{name}_max")
        predicted = max(found.memory.peak_bytes(phase) for phase in phases) / GIB
        if value and predicted:
            rows.append(PredictedAndMeasured(f"peak memory, {name}", "GiB", predicted, value))
    return rows
