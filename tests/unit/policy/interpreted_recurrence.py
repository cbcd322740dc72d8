"""The kernels of recurrent layers against float64, in Triton's interpreter on a CPU. Run by
`test_recurrence_interpreted.py`, in a process of its own: whether kernels are interpreted is decided when Triton is
imported. bf16 is tested on a GPU (`gpu/test_recurrence_cuda.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_references import noise
from kernel_references import mend_interpreter
from recurrence_references import Heads, assert_convolves, assert_decodes, assert_recurs, in_float64, with_gradients
from tiny_models import tiny_model
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from posttrain.policy.fused.gated_norm import GatedNorm
from posttrain.policy.fused.layers import FusedGatedNorm, fuse_layers

mend_interpreter()
DELTA = Heads(2, 4, 16, 16)
ODD = Heads(1, 3, 20, 12)
MAMBA = Heads(2, 4, 8, 24, corrects=False)


@pytest.mark.parametrize("heads", [DELTA, ODD, MAMBA], ids=str)
def test_a_token_of_each_sequence(heads: Heads) -> None:
    assert_decodes(heads, torch.float32, 1e-5)


LENGTHS, FOLLOWS = [70, 1, 30, 64, 3], [None, None, None, 2, 2]


@pytest.mark.parametrize("heads", [DELTA, ODD, MAMBA], ids=str)
def test_a_packed_row(heads: Heads) -> None:
    assert_recurs(LENGTHS, FOLLOWS, heads, torch.float32, 2e-5, unit=heads.corrects)


def test_several_blocks_of_columns() -> None:
    assert_recurs([66], [None], Heads(1, 1, 72, 80), torch.float32, 2e-5, unit=True)


@pytest.mark.parametrize(("bias", "silu", "width"), [(True, True, 4), (False, False, 3)])
def test_a_convolution_of_a_packed_row(*, bias: bool, silu: bool, width: int) -> None:
    assert_convolves([9, 1, 3, 14, 2], FOLLOWS, 40, torch.float32, 1e-5, bias=bias, silu=silu, width=width)


def test_the_norm_after_a_gated_delta_rule() -> None:
    x, gate, weight, grad = noise(300, 20), noise(300, 20, seed=1), noise(20), noise(300, 20, seed=2)
    norm = Qwen3_5RMSNormGated(20, eps=1e-6).double()
    norm.weight.data = weight.double()

    def reference(*given: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.func.functional_call(norm, {"weight": given[2]}, given[:2]),)

    inputs = [x, gate, weight]
    actual = with_gradients(lambda *given: (GatedNorm.apply(*given, 1e-6),), inputs, [grad])
    for one, other in zip(actual, with_gradients(reference, in_float64(inputs), [grad]), strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()


@pytest.mark.parametrize(("family", "fuses"), [("qwen3.5", True), ("granite-hybrid", False)])
def test_the_norm_is_replaced_where_it_is_the_same(family: str, *, fuses: bool) -> None:
    model = tiny_model(family)
    fuse_layers(model.get_decoder(), may_join=False)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNormGated")]
    assert norms
    assert {isinstance(norm.forward, FusedGatedNorm) for norm in norms} == {fuses}


def test_kernels_are_compared_with_torch_before_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.policy.fused import recurrence

    cpu = torch.device("cpu")
    assert recurrence.agrees_with_torch(cpu, (torch.float32, torch.float32), (16, 8), corrects=True, unit=True)
    right = recurrence.recur

    def wrong(*given: Any, unit: bool) -> Any:
        out, ends = right(*given, unit=unit)
        return out * 1.2, ends

    monkeypatch.setattr(recurrence, "recur", wrong)
    with pytest.warns(UserWarning, match="computed by torch"):
        assert not recurrence.agrees_with_torch(
            cpu, (torch.float16, torch.float32), (8, 16), corrects=False, unit=False
        )
