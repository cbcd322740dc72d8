"""Runs `interpreted_kernels.py`: the kernels' tests on a CPU, in a process where Triton interprets instead of compiling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_kernels.py")


def test_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here (it is on Linux, with the extra dev)")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, cwd=CASES.parents[3], check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed, ended.stdout
    assert int(passed.group(1)) > 50, "every case ran"
