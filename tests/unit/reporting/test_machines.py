"""What is seen of GPUs during a step; `workers.jsonl`: phases of long steps, and the ranks from time to time."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from posttrain.reporting.machines import RANKS_PERIOD_S, GpuMonitor, WorkerRows, open_nvml
from posttrain.reporting.rows import Hardware, training_row
from posttrain.types import StepReport


def nvml() -> Any:
    """Two devices, as NVML shows them."""
    module = types.ModuleType("pynvml")
    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: 1,
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=40 + handle),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=(handle + 1) * 2**30),
        "nvmlDeviceGetPowerUsage": lambda handle: 250_500,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_means_over_a_step_become_metrics_of_performance() -> None:
    values = iter([{"gpu_0_power_w": 100.0}, {"gpu_0_power_w": 300.0}])
    monitor = GpuMonitor(1.0, look=lambda: next(values))
    monitor._keep()
    seen = monitor.take()
    assert seen == {"gpu_0_power_w": 200.0}
    row = training_row(1, StepReport(metrics={}, timings_s={}, num_tokens=1, num_samples=1), Hardware(1), seen)
    assert row["performance/gpu_0_power_w"] == 200.0
    assert monitor.take() == {}  # a look that fails is left out, and so are the values before


@pytest.mark.parametrize(("visible", "utilization"), [(None, [40, 41]), ("1", [41]), ("GPU-abc,0", [41, 40]), ("", [])])
def test_the_visible_devices_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, utilization: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    look = open_nvml()
    found = {} if look is None else look()
    assert [value for name, value in found.items() if name.endswith("utilization")] == utilization
    if utilization:
        assert found["gpu_0_power_w"] == 250.5
        assert found["gpu_0_memory_gib"] in (1.0, 2.0)


def test_without_nvml_there_is_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = GpuMonitor(0.01)
    monitor.start()
    assert monitor.take() == {}
    monitor.close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def rows_of(folder: Path) -> list[dict[str, object]]:
    path = folder / "workers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def phases(folder: Path) -> list[tuple[object, object]]:
    return [(row["step"], row["phase"]) for row in rows_of(folder)]


def test_phase_is_written_when_it_begins(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path, list, lambda: True, Clock())
    workers.step = 1
    for phase in ("sampling", "training", "training", "sampling"):
        workers.phase(phase)
    assert phases(tmp_path) == [(1, "sampling"), (1, "training"), (1, "sampling")]


def test_phases_of_short_steps_are_not_written(tmp_path: Path) -> None:
    clock = Clock()
    workers = WorkerRows(tmp_path, list, lambda: True, clock)
    for step, seconds in ((1, 5.0), (2, 0.5), (3, 5.0), (4, 5.0)):
        workers.step = step
        workers.phase("training")
        clock.now += seconds
        workers.step_done(step)
    written = [step for step, phase in phases(tmp_path) if phase == "training"]
    assert written == [1, 2, 4], "step 3 came after a short one"


def test_ranks_are_asked_once_in_a_period(tmp_path: Path) -> None:
    clock = Clock()
    asked: list[float] = []
    workers = WorkerRows(tmp_path, lambda: asked.append(clock.now) or [{"rank": 0}], lambda: True, clock)
    for step in range(1, 10):
        workers.step_done(step)
        clock.now += RANKS_PERIOD_S / 2
    assert len(asked) == 5
    assert [row["ranks"] for row in rows_of(tmp_path)] == [[{"rank": 0}]] * 5


def test_rank_that_does_not_answer_does_not_end_the_run(tmp_path: Path) -> None:
    def fail() -> list[dict[str, object]]:
        raise RuntimeError("rank 1 is gone")

    WorkerRows(tmp_path, fail, lambda: True, Clock()).step_done(1)
    assert rows_of(tmp_path) == []


def test_nothing_is_written_after_a_newer_attempt_has_begun(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path, list, lambda: False, Clock())
    workers.phase("training")
    workers.step_done(1)
    assert rows_of(tmp_path) == []


def test_deleted_folder_is_no_error(tmp_path: Path) -> None:
    workers = WorkerRows(tmp_path / "gone", list, lambda: True, Clock())
    workers.phase("training")
    workers.step_done(1)
