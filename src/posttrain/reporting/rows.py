"""The rows of a step on disk: one flat row of `metrics.jsonl`, with NeMo RL's key names, and the rollouts of the step.

Throughput follows NeMo RL's definitions: tokens are those of the full sequences (prompt and response of every sample)
in every stage, generation included; end to end is tokens / total_step_time / devices. The key names say `per_gpu` on
every kind of device, so that dashboards made for NeMo RL find them. Three deviations: the rates of training count the
samples that were computed; FLOPS are reported with packing too; the utilisation is called `train_mfu` (there:
`train_fp_utilization`).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from posttrain.files import durable
from posttrain.files.redaction import redact, redact_values
from posttrain.reporting.image_files import image_rows
from posttrain.reporting.run_files import Row

if TYPE_CHECKING:
    from posttrain.types import Group, Rollout, StepReport

TOTAL_STEP = "total_step_time"
TOTAL_VALIDATION = "total_validation_time"
PEAK_MEMORY = "peak_gib_"  # a property of the machine: not under `train/`
# Times of background threads, and of the step before
BACKGROUND = ("checkpoint_write", "generation_ahead", "generation_ahead_wait")
LOGPROB_STAGES = ("policy_and_reference_logprobs", "policy_logprobs", "reference_logprobs", "previous_logprobs")


@dataclass(frozen=True)
class Hardware:
    """The denominators of throughput. `flops_per_token` is that of training: forward and backward."""

    num_devices: int
    peak_flops_per_device: float | None = None
    flops_per_token: float | None = None


def training_row(step: int, report: StepReport, hardware: Hardware, gpus: Mapping[str, float] | None = None) -> Row:
    """`gpus`: what was seen of the GPUs during the step."""
    row: Row = {"step": step}
    memory = {name: value for name, value in report.metrics.items() if name.startswith(PEAK_MEMORY)}
    row |= _prefixed("train", {name: value for name, value in report.metrics.items() if name not in memory})
    row |= _prefixed("timing/train", {**report.timings_s, TOTAL_STEP: total_seconds(report.timings_s, TOTAL_STEP)})
    row |= _prefixed("performance", {**performance(report, hardware), **memory, **(gpus or {})})
    return row


def validation_row(step: int, report: StepReport) -> Row:
    timings = {**report.timings_s, TOTAL_VALIDATION: total_seconds(report.timings_s, TOTAL_VALIDATION)}
    return {"step": step} | _prefixed("validation", report.metrics) | _prefixed("timing/validation", timings)


def num_all_unscored(rows: Sequence[Row]) -> float:
    """The number of rollouts of a run of which not one could be scored, nor compared with a teacher; 0 for every other
    run."""
    unscored, rollouts = (sum(row.get(f"train/{key}") or 0 for row in rows) for key in ("unscored", "num_samples"))
    return rollouts if unscored == rollouts and not any("train/divergence" in row for row in rows) else 0


def without_non_finite(row: Row) -> tuple[Row, dict[str, float]]:
    """The row with null for NaN and infinity, and the replaced values."""
    bad = {key: value for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: None if key in bad else value for key, value in row.items()}, bad


def _prefixed(prefix: str, values: Mapping[str, SupportsFloat | None]) -> Row:
    """Python numbers: counts stay whole, tensors and NumPy scalars of any kind become floats."""
    return {
        f"{prefix}/{name}": value if value is None or type(value) is int else float(value)
        for name, value in values.items()
    }


def top_level_stages(timings_s: Mapping[str, float]) -> dict[str, float]:
    """The stages that add up to a step. `a/b` is inside `a`, or inside `a/total` where that is timed. Totals and
    background work are left out."""
    stages = {}
    for name, seconds in timings_s.items():
        parent = name.split("/", 1)[0]
        inside_another = name != parent and (parent in timings_s or f"{parent}/total" in timings_s)
        if name in (TOTAL_STEP, TOTAL_VALIDATION, *BACKGROUND) or (inside_another and name != f"{parent}/total"):
            continue
        stages[name] = seconds
    return stages


def total_seconds(timings_s: Mapping[str, float], total_name: str) -> float:
    """The total as it was measured, or else the sum of the stages."""
    if total_name in timings_s:
        return float(timings_s[total_name])
    return float(sum(top_level_stages(timings_s).values()))


def performance(report: StepReport, hardware: Hardware) -> dict[str, float]:
    """Throughputs per device. A stage that did not run in this step has none."""
    tokens, timings_s = report.num_tokens, report.timings_s
    trained_tokens = tokens if report.num_trained_tokens is None else report.num_trained_tokens
    total_s = total_seconds(timings_s, TOTAL_STEP)
    training_s = float(timings_s.get("policy_training", 0.0))
    logprobs_s = float(sum(timings_s.get(stage, 0.0) for stage in LOGPROB_STAGES))
    rates: dict[str, float] = {}

    def add(name: str, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            rates[name] = amount / seconds / hardware.num_devices

    add("samples_per_sec_per_gpu", report.num_samples, total_s)
    add("tokens_per_sec_per_gpu", tokens, total_s)
    add("policy_training_tokens_per_sec_per_gpu", trained_tokens, training_s)
    add("policy_and_reference_logprobs_tokens_per_sec_per_gpu", tokens, logprobs_s)
    add("training_worker_group_tokens_per_sec_per_gpu", tokens, training_s + logprobs_s if training_s else 0.0)
    # Answers that were sampled in this step differ from those that it trained on where groups are filtered, kept for
    # later steps or recorded.
    trained = sum(rollout.completion.num_sampled for group in report.groups for rollout in group.rollouts)
    sampled = report.metrics.get("num_generated_tokens")
    sampled_tokens = tokens * (1.0 if sampled is None or not trained else sampled / trained)
    sampling_s = float(timings_s.get("generation", timings_s.get("generation_ahead", 0.0)))
    add("generation_tokens_per_sec_per_gpu", sampled_tokens, sampling_s)
    if report.num_samples > 0 and tokens > 0:
        rates["mean_total_tokens_per_sample"] = tokens / report.num_samples
    if hardware.flops_per_token:
        tflops = hardware.flops_per_token * trained_tokens / 1e12  # as in NeMo RL
        add("train_flops_per_gpu", tflops, training_s)
    if hardware.peak_flops_per_device and "train_flops_per_gpu" in rates:
        rates["train_mfu"] = rates["train_flops_per_gpu"] * 1e12 / hardware.peak_flops_per_device
    return rates


# ------------------------------------------------------------------------------------------- rollouts


def _finite(value: float | None) -> float | None:
    """null for NaN and infinity, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else value


_REPEATED = re.compile(r"(<[^<>\s]{1,60}>)\1{7,}")  # places of an image's tokens


def _counted(found: re.Match[str]) -> str:
    return f"{found[1]} × {len(found[0]) // len(found[1])}"


def group_row(group: Group) -> Row:
    task = group.task
    return {
        "draw": task.draw,
        "id": task.id,
        "prompt": _REPEATED.sub(_counted, task.prompt) if task.images else task.prompt,
        **({"images": image_rows(task.images)} if task.images else {}),
        "reference": _plain(task.reference),
        "completions": [_completion_row(rollout) for rollout in group.rollouts],
    }


def _completion_row(rollout: Rollout) -> Row:
    score = rollout.score
    shaped = {} if rollout.shaped_reward is None else {"shaped_reward": _finite(rollout.shaped_reward)}
    talk: Row = {}
    if (conversation := rollout.completion.conversation) is not None:
        turns = [{"role": u.role, "text": u.text, "num_tokens": u.num_tokens} for u in conversation.utterances]
        talk = {"turns": turns, "counts": {name: _finite(value) for name, value in conversation.counts.items()}}
    return {
        "text": rollout.completion.text,
        **talk,
        "reward": _finite(score.reward),
        **shaped,
        "parts": {name: _finite(value) for name, value in score.parts.items()},
        "advantage": _finite(rollout.advantage),
        "error": None if score.error is None else redact(score.error),
        "finish_reason": rollout.completion.finish_reason,
        "num_tokens": rollout.completion.num_sampled,
        "versions": rollout.completion.versions,
    }


def _plain(value: object) -> object:
    """A reference as JSON: it may be any value of a dataset, and what JSON does not have becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def write_rollouts(path: Path, groups: Sequence[Group]) -> None:
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    # mtime 0 and no file name: the header of a gzip file would otherwise differ from run to run.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=5) as packed:
        for group in groups:
            line = redact_values(json.dumps(group_row(group), ensure_ascii=False, allow_nan=False)) + "\n"
            # A lone surrogate has no UTF-8 form; written as \udc80 it is a legal JSON escape.
            packed.write(line.encode("utf-8", "backslashreplace"))
    durable.write_bytes(path, buffer.getvalue())


def read_rollouts(path: Path) -> list[Row]:
    with gzip.open(path, "rb") as lines:
        return [json.loads(line) for line in lines]


def is_accuracy(row: Row) -> bool:
    """Whether `validation/accuracy` of a row is one: a share of pairs, or a mean of rewards that are all 0 or 1.

    Rewards between 0 and 1 have the variance mean · (1 - mean) only if each of them is one or the other.
    """
    mean = row.get("validation/reward")
    if mean is None:
        return True
    low, high, spread = (row.get(f"validation/reward_{name}") for name in ("min", "max", "std"))
    if low is None or high is None or spread is None:
        return 0 <= mean <= 1
    return bool(low >= 0 and high <= 1 and abs(spread**2 - mean * (1 - mean)) < 1e-6)
