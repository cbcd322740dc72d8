"""The planner's count of activations against what autograd really keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_pass_keeps_what_the_planner_counts() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here (it is on Linux, with the extra dev)")
    script = Path(__file__).with_name("saved_by_a_pass.py")
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(cases) == 3
    for case in cases:
        assert case["num_fused"] == 2, case
        # The CPU's attention keeps its output in two layouts; a row has a few numbers of its own, counted as nothing.
        assert case["kept"] - case["second_outputs"] == pytest.approx(case["counted"], rel=0.01), case
