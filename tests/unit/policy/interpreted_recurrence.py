"""The kernels of recurrent layers against float64, in Triton's interpreter on a CPU. Run by
`test_recurrence_interpreted.py`, in a process of its own: whether kernels are interpreted is decided when Triton is
imported. bf16 is tested on a GPU (`gpu/test_recurrence_cuda.py`).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fused_references import noise
from kernel_references import mend_interpreter
from recurrence_references import (
    Heads,
    assert_convolves,
    assert_decodes,
    assert_recurs,
    in_float64,
    random_inputs,
    with_gradients,
)
from tiny_models import tiny_model
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from posttrain.policy.fused.gated_norm import GatedNorm
from posttrain.policy.fused.kernel_trials import Trial
from posttrain.policy.fused.layers import FusedGatedNorm, fuse_layers
from posttrain.policy.recurrence import PackedRecurrence, RowPiece

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


# -- trials ------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
FP32 = torch.float32


def given(*, heads: int = 2, before: bool = False, trains: bool = True, width: int = 16) -> list[Any]:
    """Arguments of `recur`, for one sequence of 70 tokens."""
    inputs = random_inputs(70, Heads(1, heads, width, 16), FP32)
    states = torch.randn(1, heads, width, 16) if before else None
    return [*(x.requires_grad_(trains) for x in inputs), states]


@pytest.fixture
def fresh_trials(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Trials that have not run; what they are asked for."""
    from posttrain.policy.fused import convolution, gated_norm, recurrence

    asked: list[dict[str, Any]] = []

    def noted(comparisons: Any) -> Any:
        def note(*where: Any, **key: Any) -> Any:
            asked.append(key)
            return comparisons(*where, **key) if compares else ()

        return note

    compares = getattr(request, "param", True)
    monkeypatch.setattr(recurrence, "TRIAL_PIECES", (RowPiece(0, 70), RowPiece(70, 74, 0)))
    for module in (recurrence, convolution, gated_norm):
        monkeypatch.setattr(module, "TRIAL", Trial("layers", noted(module._comparisons)))
    return asked


@pytest.mark.parametrize("fresh_trials", [False], indirect=True, ids=["none is computed"])
def test_a_trial_is_of_the_specialisation_that_the_run_uses(fresh_trials: list[dict[str, Any]]) -> None:
    from posttrain.policy.fused import recurrence

    cases: list[dict[str, Any]] = [{}, {"heads": 3}, {"before": True}, {"trains": False}, {"width": 32}]
    for case in (*cases, {}):
        assert recurrence.fits(*given(**case), unit=True)
    assert len(fresh_trials) == len(cases), "each once"
    assert [key["group"] for key in fresh_trials] == [2, 3, 2, 2, 2]
    assert [key["has_before"] for key in fresh_trials] == [False, False, True, False, False]
    assert [key["trains"] for key in fresh_trials] == [True, True, True, False, True]


def test_rows_that_do_not_begin_at_16_bytes_are_copied() -> None:
    """The trial and the run then have the same specialisation."""
    from posttrain.policy.fused.recurrence import dense_heads

    wide = torch.randn(9, 100)
    aligned, shifted = wide[:, :96].unflatten(1, (2, 48)), wide[:, 4:].unflatten(1, (2, 48))
    for x in (aligned, shifted, wide.flatten()[1:865].view(9, 2, 48)):
        dense = dense_heads(x)
        assert torch.equal(dense, x)
        assert dense.stride() == (96, 48, 1)
        assert dense.data_ptr() % 16 == 0
    same = torch.randn(9, 128)[:, 32:].unflatten(1, (2, 48))
    assert dense_heads(same) is same


class Broken:
    """A kernel with a wrong tile: the first sixteenth of the tensor at `place` among its arguments has another sign."""

    def __init__(self, kernel: Any, place: int) -> None:
        self.kernel, self.place = kernel, place

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.kernel[grid](*arguments, **options)
            out = arguments[self.place]
            out[: max(len(out) // 16, 1)] *= -1

        return launch


# The place of a result among the arguments.
WRITES = {"outputs": 6, "key_gradients": 8}


@pytest.mark.parametrize("kernel", WRITES)
def test_torch_computes_where_a_kernel_is_wrong(
    kernel: str, monkeypatch: pytest.MonkeyPatch, fresh_trials: list[dict[str, Any]]
) -> None:
    from posttrain.policy import recurrence as packed_rows
    from posttrain.policy.fused import recurrence_kernels

    monkeypatch.setattr(packed_rows, "_has_kernels", lambda x: True)
    monkeypatch.setattr(packed_rows, "KERNEL_WIDTHS", (16,))
    monkeypatch.setattr(recurrence_kernels, kernel, Broken(getattr(recurrence_kernels, kernel), WRITES[kernel]))
    packed, inputs = PackedRecurrence([RowPiece(0, 70)], CPU), given()
    with pytest.warns(UserWarning, match="computed by torch"):
        out, ends = packed.recur(*inputs, unit=True)
    expected, expected_ends = packed.recur_in_torch(*inputs, unit=True)
    assert torch.equal(out, expected)
    assert torch.equal(ends, expected_ends)
    assert len(fresh_trials) == 1


def test_a_wrong_convolution_or_norm_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fresh_trials: list[dict[str, Any]]
) -> None:
    from posttrain.policy import recurrence as packed_rows
    from posttrain.policy.fused import convolution, gated_norm

    monkeypatch.setattr(packed_rows, "_has_kernels", lambda x: True)
    packed, x, weight = PackedRecurrence([RowPiece(0, 9)], CPU), noise(9, 40), noise(40, 4)
    norm = Qwen3_5RMSNormGated(16, eps=1e-6)
    norm.forward = FusedGatedNorm(norm)
    rows = (noise(9, 16), noise(9, 16, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            right = packed.convolve(x, weight, None, silu=True), norm(*rows)
    assert len(fresh_trials) == 2
    # Only gradients are wrong.
    own, nothing = convolution._Convolve, (None, None, None)
    monkeypatch.setattr(own, "backward", lambda ctx, grad: (*nothing[1:], grad, ctx.saved_tensors[2].T, *nothing))
    monkeypatch.setattr(gated_norm.GatedNorm, "backward", lambda ctx, grad: (grad, grad, ctx.saved_tensors[2], None))
    for wrong, expected in (
        (lambda: packed.convolve(x.requires_grad_(), weight, None, silu=True), right[0]),
        (lambda: norm(rows[0].requires_grad_(), rows[1]), right[1]),
    ):
        with pytest.warns(UserWarning, match="computed by torch"):
            torch.testing.assert_close(wrong(), expected)


def test_decode_steps_have_trials_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.engines.native import kernels, recurrent_states
    from posttrain.engines.native.kernels import recurrent
    from posttrain.models.tensor_files import TensorFacts

    shapes = {(0, 0): TensorFacts((4, 16, 16), FP32), (0, 1): TensorFacts((3, 40), FP32)}
    states = recurrent_states.RecurrentStates(shapes, 5, CPU)
    decode = recurrent_states.DecodeRecurrence(states, torch.tensor([3, 1]))
    decode.kernels = kernels
    query, key, value, decay, beta = random_inputs(2, DELTA, FP32)
    x, weight = noise(2, 40), noise(40, 4)
    found = []
    for is_broken in (False, True):
        for pool in states.pools.values():
            pool.copy_(noise(*pool.shape))
        for name in ("_step", "_convolve") if is_broken else ():
            kernel = getattr(recurrent, name)
            monkeypatch.setattr(recurrent, name, Broken(kernel, 7 if name == "_step" else 5))
        for name, make in (("RECURRENCE", "_recurrence"), ("CONVOLUTION", "_convolution")):
            trial = Trial("layers", getattr(recurrent, f"{make}_comparisons"))
            monkeypatch.setattr(recurrent, f"{name}_TRIAL", trial)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            outputs = [decode.recur((0, 0), query, key, value, decay, beta, unit=True)]
            outputs.append(decode.convolve((0, 1), x, weight, None, silu=True))
        assert len([one for one in warned if "computed by torch" in str(one.message)]) == 2 * is_broken
        found.append([*outputs, *(pool.clone() for pool in states.pools.values())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
