"""bench/fp8_kernels.py compiles for a Hopper GPU; what it computes is checked by `fp8_products.py --tiny`."""

from pathlib import Path

import pytest
from triton_without_gpu import WITHOUT_TRITON, only_compile

pytest.importorskip("triton", reason=WITHOUT_TRITON)


@pytest.mark.parametrize("descriptor", [False, True])
def test_few_rows_use_the_fp8_instructions(descriptor: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fp8_kernels import Tile, compile_product, compile_quantisation

    only_compile(monkeypatch, tmp_path)
    kernel = compile_product(Tile(True, 16, 64, 128, 4, 4, descriptor))
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
    assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == descriptor
    quantise = compile_quantisation(4096, 1, 4).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in quantise
    assert "v4.b32" in quantise, "sixteen bytes at a time"
