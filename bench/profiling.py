"""The largest costs of a piece of work, by kernel on a GPU and by operator on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from machine import seconds_of
from tables import table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_NAME_WIDTH = 88


@dataclass(frozen=True)
class Cost:
    name: str
    milliseconds: float
    share: float  # of all that was measured
    calls: int


def largest_costs(work: Callable[[], Any], device: str, count: int = 10) -> tuple[list[Cost], float]:
    """The `count` largest costs of `work`, and the share of its wall-clock time that they and the rest add up to."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        seconds = seconds_of(work)
    costs = []
    for event in found.key_averages():
        # An operator's time on the device is that of its kernels, which are listed themselves.
        if (event.device_type == DeviceType.CUDA) != on_gpu:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        costs.append((event.key, microseconds / 1e3, event.count))
    total = sum(milliseconds for _, milliseconds, _ in costs) or 1.0
    costs.sort(key=lambda cost: -cost[1])
    largest = [Cost(name, ms, ms / total, calls) for name, ms, calls in costs[:count]]
    return largest, total / 1e3 / seconds


def cost_table(costs: Sequence[Cost], busy: float, device: str) -> str:
    title = f"largest costs; {'the GPU' if device == 'cuda' else 'operators'} busy {busy:.0%} of the time"
    rows = [(_short(cost.name), cost.milliseconds, f"{cost.share:.1%}", cost.calls) for cost in costs]
    return f"{title}\n{table(['kernel' if device == 'cuda' else 'operator', 'ms', 'share', 'calls'], rows)}"


def _short(name: str) -> str:
    name = name.replace("void ", "").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"
