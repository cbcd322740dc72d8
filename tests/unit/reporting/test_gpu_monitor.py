"""What is seen of GPUs during a step."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from posttrain.reporting.gpu_monitor import GpuMonitor, open_nvml
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
