"""Runs the sides of a job one after the other, each in a process of its own, and lays the two side by side.

Times are those that a side measured of its own steps; memory is that of its process and of the processes it started.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from side_by_side.job import GRPO, POSTTRAIN, TRL, Job, peaks_of_helpers

GIB = 2**30
_LOOK_EVERY_S = 0.2
# With the same weights and tokens both sides compute the same DPO loss and gradient; rounding differs.
_SAME_LOSS = 1e-3


class SideFailedError(RuntimeError):
    """One of the two programs did not finish."""


@dataclass(frozen=True)
class Outcome:
    """One side of one job."""

    version: str
    steps: Sequence[Mapping[str, Any]]
    inputs: str  # fingerprint of the tokens it was given
    process_bytes: int
    helper_bytes: int  # peaks of the processes it started, added up
    others_share: float  # of the machine's cores, used by anybody else meanwhile

    @property
    def measured(self) -> Sequence[Mapping[str, Any]]:
        """All steps but the first, which warms up; the first, if there is no other."""
        return self.steps[1:] or self.steps

    @property
    def best(self) -> Mapping[str, Any]:
        return min(self.measured, key=lambda step: step["seconds"])

    @property
    def total_bytes(self) -> int:
        return self.process_bytes + self.helper_bytes

    def as_json(self) -> dict[str, Any]:
        seconds = [step["seconds"] for step in self.measured]
        return {
            **vars(self),
            "best_step_s": min(seconds),
            "median_step_s": statistics.median(seconds),
            "peak_gib": self.total_bytes / GIB,
        }


def run_side(job: Job, side: str, scratch: Path) -> Outcome:
    job_file, result_file = scratch / f"{job.kind}.json", scratch / f"{job.kind}-{side}-result.json"
    log_file = scratch / f"{job.kind}-{side}.log"
    job.write(job_file)
    here = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": str(job.num_threads),
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-m", f"side_by_side.{side}_side", str(job_file), str(result_file)]
    before, start, busy = _cpu_of_children(), time.monotonic(), _busy_cpu()
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            helpers = _watch_helpers(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log_file.read_text().splitlines()[-25:])
        raise SideFailedError(f"{side} ended with exit code {process.returncode}; the end of its output:\n{tail}")
    others = (_busy_cpu() - busy) - (_cpu_of_children() - before)
    result = json.loads(result_file.read_text())
    seen = {int(pid): peak for pid, peak in result["helpers"].items()}  # by the side itself
    return Outcome(
        version=result["version"],
        steps=result["steps"],
        inputs=result["inputs"],
        process_bytes=result["peak_bytes"],
        helper_bytes=sum(max(helpers.get(pid, 0), seen.get(pid, 0)) for pid in helpers.keys() | seen.keys()),
        others_share=max(0.0, others / ((time.monotonic() - start) * (psutil.cpu_count() or 1))),
    )


def _watch_helpers(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """Wait for the process; the peak of each process that it started meanwhile."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid, peak in peaks_of_helpers(process.pid).items():
            peaks[pid] = max(peaks.get(pid, 0), peak)
        time.sleep(_LOOK_EVERY_S)
    return peaks


def _busy_cpu() -> float:
    """CPU seconds of the whole machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


# -- the table ---------------------------------------------------------------------------------------------------------


def check_same_work(outcomes: Mapping[str, Outcome]) -> list[str]:
    """What is wrong with the comparison; nothing, if both sides did the same job."""
    trl, ours = outcomes[TRL], outcomes[POSTTRAIN]
    wrong = []
    if trl.inputs != ours.inputs:
        wrong.append(f"the two sides were given different tokens (fingerprints {trl.inputs} and {ours.inputs})")
    counts = {side: [step["tokens"] for step in outcome.steps] for side, outcome in outcomes.items()}
    if counts[TRL] != counts[POSTTRAIN]:
        wrong.append(f"tokens per step differ: TRL {counts[TRL]}, posttrain {counts[POSTTRAIN]}")
    return wrong


def summary(job: Job, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Everything about one job, for the JSON file."""
    found: dict[str, Any] = {"work": job.work, "sides": {side: o.as_json() for side, o in outcomes.items()}}
    if len(outcomes) == 2:
        trl, ours = outcomes[TRL], outcomes[POSTTRAIN]
        speed, memory = trl.best["seconds"] / ours.best["seconds"], ours.total_bytes / trl.total_bytes
        found["ratios"] = {
            "speed": speed,
            "cpu": trl.best["cpu_seconds"] / ours.best["cpu_seconds"],
            "memory": memory,
        }
        found["goals"] = {}
        if job.goal_speed is not None:
            found["goals"]["speed"] = {"goal": job.goal_speed, "reached": speed >= job.goal_speed}
        if job.goal_memory is not None:
            found["goals"]["memory"] = {"goal": job.goal_memory, "reached": memory <= job.goal_memory}
        found["same_work"] = not check_same_work(outcomes)
    return found


def table(job: Job, outcomes: Mapping[str, Outcome], model_title: str) -> str:
    sides = list(outcomes.values())
    found = summary(job, outcomes)
    rows: list[tuple[str, list[str], str]] = []

    def row(name: str, key: str, values: Sequence[float | None], unit: str = "{:.2f}", ratio: bool = True) -> None:
        cells = ["-" if value is None else unit.format(value) for value in values]
        compared = ""
        if ratio and len(values) == 2 and values[0] and values[1]:
            compared = f"{values[0] / values[1]:.2f}x"
        rows.append((name, cells, " ".join([compared, _verdict(found, key)]).strip()))

    row("seconds per step (best)", "speed", [side.best["seconds"] for side in sides])
    for stage in sides[0].best["stages"]:
        row(f"  {stage}", "", [side.best["stages"][stage] for side in sides])
    row("  CPU seconds", "", [side.best["cpu_seconds"] for side in sides])
    row("first step (warm-up)", "", [side.steps[0]["seconds"] for side in sides])
    row("peak memory, GiB", "memory", [side.total_bytes / GIB for side in sides])
    helpers = [side.helper_bytes / GIB for side in sides]
    row("  of which helper processes", "", helpers, ratio=False)
    tokens = [side.best["tokens"] for side in sides]
    row("tokens per step", "", tokens, "{:.0f}", ratio=False)
    row("  per second", "", [side.best["tokens"] / side.best["seconds"] for side in sides], "{:.0f}", ratio=False)
    row("computed in training", "", [side.best["computed_tokens"] for side in sides], "{:.0f}", ratio=False)
    row("loss of the last step", "", [side.steps[-1]["loss"] for side in sides], "{:.5f}", ratio=False)
    row("grad norm of the first step", "", [side.steps[0]["grad_norm"] for side in sides], "{:.4f}", ratio=False)
    row("others' share of the cores", "", [side.others_share for side in sides], "{:.0%}", ratio=False)
    header = f"{job.kind.upper()}: {model_title}, {job.work}, fp32; threads: {job.num_threads}, steps: {job.num_steps}"
    titles = [side.version for side in sides]
    widths = [max(len(title), 10) + 2 for title in titles]
    lines = [header, " " * 30 + "".join(t.rjust(w) for t, w in zip(titles, widths, strict=True)) + "   ratio"]
    for name, cells, remark in rows:
        line = name.ljust(30) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
        lines.append(f"{line}   {remark}".rstrip())
    return "\n".join(lines)


def _verdict(found: Mapping[str, Any], key: str) -> str:
    if key not in found.get("goals", {}):
        return ""
    goal = found["goals"][key]
    wanted = f">= {goal['goal']}x faster" if key == "speed" else f"<= {goal['goal']:.0%} of TRL's"
    value = "" if key == "speed" else f" ({found['ratios']['memory']:.0%})"
    return f"{value} goal {wanted}: {'reached' if goal['reached'] else 'NOT reached'}".strip()


def remarks(kind: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What a reader must know to judge the numbers."""
    shared = (
        "posttrain computes a prompt once for all its samples, and in training once for all answers that share a "
        "micro-batch; TRL computes it with every answer and pads to the longest row."
    )
    found = [shared]
    if kind == GRPO:
        found.append(
            "TRL samples with model.generate and also computes the entropy of every token; posttrain samples with its "
            "own "
            "engine. Samples differ (other random numbers), their lengths do not. Rewards are computed in the process "
            "by "
            "TRL, in a helper process by posttrain."
        )
    else:
        found.append("Both hold the reference model in memory and train on the same tokens: the losses must agree.")
        if len(outcomes) == 2:
            losses = [outcome.steps[-1]["loss"] for outcome in outcomes.values()]
            agree = abs(losses[0] - losses[1]) <= _SAME_LOSS * abs(losses[0])
            found.append(f"They {'do' if agree else 'DO NOT'}: {losses[0]:.6f} and {losses[1]:.6f} in the last step.")
    if any(outcome.others_share > 0.1 for outcome in outcomes.values()):
        found.append("Others used more than a tenth of the cores: times are unreliable, look at the CPU seconds.")
    return found
