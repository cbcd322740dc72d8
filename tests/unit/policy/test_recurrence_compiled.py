"""Compiles the kernels of recurrent layers for a Hopper GPU, without having one, with the sizes of Qwen3.5 and of a
Mamba-2 hybrid: they fit its registers and its shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recurrence_references import Heads, pieces_of, random_inputs
from triton_without_gpu import WITHOUT_TRITON, Compiled, only_compile

from posttrain.policy.recurrence import PackedRecurrence

pytest.importorskip("triton", reason=WITHOUT_TRITON)

_SHARED_BYTES = 227 * 1024
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    return only_compile(monkeypatch, tmp_path)


@pytest.mark.parametrize("heads", [Heads(1, 2, 128, 128), Heads(1, 2, 128, 64, corrects=False)], ids=str)
def test_kernels_of_a_packed_row_compile(heads: Heads, compiled: Compiled) -> None:
    from posttrain.policy.fused import convolution, recurrence

    packed = PackedRecurrence(pieces_of([70, 3], [None, 0]), torch.device("cpu"))
    inputs = [None if x is None else x.requires_grad_() for x in random_inputs(73, heads, BF16)]
    out, _ = recurrence.recur(packed.chunks, *inputs, None, unit=heads.corrects)
    out.sum().backward()
    x, weight = (torch.empty(s, dtype=BF16).requires_grad_() for s in ((73, 512), (512, 4)))
    taps = packed.taps_of(4)
    convolution.convolve(packed.users_of(4), taps, x, weight, None, None, silu=True).sum().backward()
    of_rule = {"unit_rows", "corrections", "system_gradients", "system_key_gradients"} if heads.corrects else set()
    passes = {"pass_states", "outputs", "added_gradients", "pass_gradients", "query_gradients"}
    rest = {"key_gradients", "decay_gradients", "fold_heads", "_forward", "_gradient_of_sums", "_gradient_of_input"}
    assert of_rule | passes | rest == set(compiled)
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= _SHARED_BYTES, name


def test_kernels_of_a_decoded_token_compile(compiled: Compiled) -> None:
    from posttrain.engines.native import kernels

    heads, slots = Heads(16, 32, 128, 128), torch.zeros(2, dtype=torch.long)
    kernels.recurrence_step(torch.empty(3, 32, 128, 128), slots, *random_inputs(2, heads, BF16), unit=True)
    x, weight = torch.empty(2, 8192, dtype=BF16), torch.empty(8192, 4, dtype=BF16)
    kernels.convolution_step(torch.empty(3, 3, 8192, dtype=BF16), slots, x, weight, None, silu=True)
    assert {"_step", "_convolve"} == set(compiled)
    assert "ld.global.v4" in compiled["_step"].asm["ptx"]
