"""Triton on a machine without a GPU: tests in its interpreter, and compiling for a Hopper GPU without launching."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WITHOUT_TRITON = "Triton is not installed here (it is on Linux, with the extra dev)"
Compiled = dict[str, Any]


def run_interpreted(cases: Path, *, more_than: int) -> None:
    """Run the tests in `cases` in a process of their own: whether kernels are interpreted is decided at import."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=root, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed, ended.stdout
    assert int(passed.group(1)) > more_than, "every case ran"


class _HopperWithoutGpu:
    """A driver that names its target and can do nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def only_compile(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Compiled:
    """From here on launches compile for a Hopper GPU and do not run; the kernels by name, as they come."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets in this process (TRITON_INTERPRET)")
    kernels: Compiled = {}
    launch: Callable[..., Any] = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)
        self.device_caches.clear()
        return kernels[self.__name__]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(JITFunction, "run", compile_instead)
    monkeypatch.setattr(driver, "_active", _HopperWithoutGpu())
    return kernels
