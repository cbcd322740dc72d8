"""Compiles the fused kernels for a Hopper GPU, without having one, with the sizes of an 8B model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here (it is on Linux, with the extra dev)")

BF16 = torch.bfloat16


class HopperWithoutGpu:
    """A driver that names its target and can do nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets in this process (TRITON_INTERPRET)")
    kernels: dict[str, Any] = {}
    launch: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)
        self.device_caches.clear()
        return kernels[self.__name__]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", HopperWithoutGpu())
    return kernels


def test_kernels_of_a_layer_compile(compiled: dict[str, Any]) -> None:
    from posttrain.policy.fused import kernels

    rows, width, inner, head = 3, 4096, 14336, 128
    x, weight = torch.empty(rows, width), torch.empty(width, dtype=BF16)
    delta = torch.empty(rows, width, dtype=BF16)
    for add in (None, delta):
        total, y, scale = kernels.norm_forward(x, add, weight, 1e-5, BF16)
        kernels.norm_backward(y, None if add is None else x, total, weight, scale, BF16, needs_weight=add is None)
    kernels.norm_again(x, weight, scale, BF16)
    qkv, angles = torch.empty(rows, 48 * head, dtype=BF16), torch.empty(rows, head)
    kernels.rotate(qkv, angles, angles, 40, out=qkv)
    gate_up = torch.empty(rows, 2 * inner, dtype=BF16)
    product = kernels.swiglu_forward(*gate_up.chunk(2, dim=1))
    kernels.swiglu_backward(product, *gate_up.chunk(2, dim=1), *gate_up.chunk(2, dim=1), again=True)
    assert {"_norm_forward", "_norm_apply", "_norm_backward", "_rotate", "_swiglu_forward", "_swiglu_backward"} == set(
        compiled
    )


def test_kernels_of_the_head_compile(compiled: dict[str, Any]) -> None:
    from posttrain.policy.fused import softmax

    logits, targets = torch.empty(3, 128_256), torch.zeros(3, dtype=torch.long)
    normalisers, chosen = softmax.logprobs(logits, targets, 0.5)
    softmax.logit_gradient(logits, targets, normalisers, chosen, 0.5, BF16)
    assert set(compiled) == {"_logprobs", "_gradient"}
