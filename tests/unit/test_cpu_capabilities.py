"""Which kernels of torch `make invariants` tests, and that ATEN_CPU_CAPABILITY selects them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cpu_capabilities import below


@pytest.mark.parametrize(
    ("best", "others"),
    [("DEFAULT", ()), ("AVX2", ("default",)), ("AVX512", ("default", "avx2")), ("SVE256", ("default",))],
)
def test_only_capabilities_below_the_best_are_named(best: str, others: tuple[str, ...]) -> None:
    assert below(best) == others


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="a capability is already chosen")
def test_the_environment_variable_selects_the_kernels() -> None:
    script = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    for capability in below(torch.backends.cpu.get_cpu_capability()):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        found = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip().lower() == capability
