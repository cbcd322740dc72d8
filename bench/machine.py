"""What the numbers were measured on, and the two clocks they are measured with: seconds that wait for the device, and
peaks of memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
_PACKAGES = ("posttrain", "torch", "transformers", "triton", "peft", "trl", "vllm", "accelerate")


def facts(device: str) -> dict[str, Any]:
    """Machine, versions and date, for the JSON file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: found for name in _PACKAGES if (found := version_of(name))},
    }


def version_of(package: str) -> str | None:
    if package == "posttrain":
        from posttrain import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def resolve_device(setting: str) -> str:
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return setting


def resolve_dtype(setting: str, device: str) -> torch.dtype:
    if setting == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[setting]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock seconds until the device has finished `work`."""
    synchronise()
    start = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - start


def reset_peak() -> None:
    """Start counting anew; on a CPU the peak is that of the whole process, and cannot be reset."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """The most memory that tensors held on a GPU since `reset_peak`; the most that the process ever held on a CPU."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def matrix_roof(device: str, size: int | None = None) -> float:
    """FLOP/s of a plain matrix product on this machine, now: what shares of the roof are shares of."""
    size = size or (8192 if device == "cuda" else 512)
    repeats = 20
    best = _best_seconds_of_products(device, size, repeats)
    if device == "cuda":
        torch.cuda.empty_cache()  # the model needs the room
    return 2 * size**3 * repeats / best


def _best_seconds_of_products(device: str, size: int, repeats: int) -> float:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def products() -> None:
        for _ in range(repeats):
            a @ b

    products()  # warms up clocks and caches
    return min(seconds_of(products) for _ in range(3))
