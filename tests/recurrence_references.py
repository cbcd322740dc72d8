"""Recurrent layers, slow and obvious: token by token in float64, and random inputs for them, on any device.

Used by `unit/policy/interpreted_recurrence.py` (Triton's interpreter, on a CPU) and by `gpu/test_recurrence_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.policy.recurrence import (
    PackedRecurrence,
    RowPiece,
    convolution_step,
    in_exact_types,
    recurrence_step,
)


@dataclass(frozen=True)
class Heads:
    """Sizes of a recurrent layer."""

    keys: int = 2
    values: int = 4
    key_width: int = 16
    value_width: int = 16
    corrects: bool = True  # a gated delta rule, and not Mamba-2


def pieces_of(lengths: Sequence[int], follows: Sequence[int | None]) -> list[RowPiece]:
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return [RowPiece(s, s + n, f) for s, n, f in zip(starts, lengths, follows, strict=True)]


def random_inputs(tokens: int, heads: Heads, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Any]:
    """query, key, value, log_decay, beta (None for Mamba-2). Keys of neighbours are alike, as those of text are."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    query, key = random(heads.keys, heads.key_width), random(heads.keys, heads.key_width)
    key = key + random(heads.keys, heads.key_width)[:1] * 2
    if not heads.corrects:
        query, key = (x * heads.key_width**-0.5 for x in (query, key))
    value = random(heads.values, heads.value_width)
    decay = -torch.nn.functional.softplus(random(heads.values)) * torch.rand(heads.values, generator=generator)
    rate = random(heads.values).sigmoid()
    inputs = [query.to(dtype), key.to(dtype), value.to(dtype), decay, rate.to(dtype) if heads.corrects else None]
    return [None if x is None else x.to(device) for x in inputs]


def stepwise(pieces: Sequence[RowPiece], inputs: Sequence[Any], before: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    """The output of every token and the state after each piece, one token after the other."""
    rows, state = [], {}
    q, k, v, decay, beta = in_exact_types(*inputs, unit=unit)
    for at, piece in enumerate(pieces):
        state[at] = before[at] if piece.follows is None else state[piece.follows]
        for t in range(piece.start, piece.end):
            rate = None if beta is None else beta[t : t + 1]
            one = slice(t, t + 1)
            row, after = recurrence_step(state[at][None], q[one], k[one], v[one], decay[one], rate)
            rows.append(row[0])
            state[at] = after[0]
    return torch.stack(rows), torch.stack([state[at] for at in range(len(pieces))])


def with_gradients(function: Any, inputs: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of `function`, and the gradients of their sum times `weights` for each input."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    total = sum((out.double() * weight.to(out.device)).sum() for out, weight in zip(outputs, weights, strict=True))
    wanted = [x for x in leaves if x is not None]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, wanted)]


def in_float64(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in inputs]


def assert_recurs(
    lengths: Sequence[int], follows: Sequence[int | None], heads: Heads, dtype: torch.dtype, tolerance: float,
    *, unit: bool, device: str = "cpu", steps: bool = True,
) -> None:  # fmt: skip
    """Outputs, last states and all gradients of the kernels against float64: step by step, or the plain chunks."""
    from posttrain.policy.fused import recurrence

    pieces = pieces_of(lengths, follows)
    inputs = random_inputs(sum(lengths), heads, dtype, device)
    generator = torch.Generator().manual_seed(1)
    sizes = (len(pieces), heads.values, heads.key_width, heads.value_width)
    before = torch.randn(sizes, generator=generator).to(device)
    weights = [torch.randn(inputs[2].shape, generator=generator).to(device).double()]
    weights += [torch.randn(sizes, generator=generator).to(device).double()]
    packed = PackedRecurrence(pieces, torch.device(device))

    def ours(*given: Any) -> Any:
        return recurrence.recur(packed.chunks, *given, unit=unit)

    def reference(*given: Any) -> Any:
        return stepwise(pieces, given[:5], given[5], unit) if steps else packed.recur(*given, unit=unit)

    actual = with_gradients(ours, [*inputs, before], weights)
    expected = with_gradients(reference, in_float64([*inputs, before]), weights)
    names = ["out", "ends", "query", "key", "value", "log_decay", *(["beta"] if heads.corrects else []), "before"]
    for name, one, other in zip(names, actual, expected, strict=True):
        assert one.isfinite().all(), name
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= tolerance, f"{name} of {lengths}: {error:.2e}"
        # A wrong tile among many right ones hides behind the largest number, not behind the mean error.
        mean = (one.double() - other).abs().mean() / other.abs().mean()
        assert mean <= tolerance, f"{name} of {lengths}: mean {mean:.2e}"
    for one, other in zip(actual, with_gradients(ours, [*inputs, before], weights), strict=True):
        assert torch.equal(one, other), "two runs give the same bits"


def assert_convolves(
    lengths: Sequence[int], follows: Sequence[int | None], channels: int, dtype: torch.dtype, tolerance: float,
    device: str = "cpu", *, bias: bool = True, silu: bool = True, width: int = 4,
) -> None:  # fmt: skip
    from posttrain.policy.fused import convolution

    packed = PackedRecurrence(pieces_of(lengths, follows), torch.device(device))
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), channels), (channels, width), *([(channels,)] if bias else [])]
    inputs = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    inputs = [*inputs, None] if not bias else inputs
    weights = [torch.randn(shapes[0], generator=generator).to(device).double()]
    windows = torch.randn(len(lengths), width - 1, channels, generator=generator).to(dtype).to(device)
    for before in (None, windows):
        wide = None if before is None else before.double()

        def ours(*given: Any, before: Tensor | None = before) -> Any:
            return (convolution.convolve(packed.users_of(width), packed.taps_of(width), *given, before, silu=silu),)

        def reference(*given: Any, wide: Tensor | None = wide) -> Any:
            return (packed.convolve(*given, wide, silu=silu),)

        actual, expected = with_gradients(ours, inputs, weights), with_gradients(reference, in_float64(inputs), weights)
        for name, one, other in zip(("out", "x", "weight", "bias"), actual, expected, strict=False):
            error = (one.double() - other).abs().max() / other.abs().max()
            assert error <= tolerance, f"{name}: {error:.2e}"


def assert_decodes(heads: Heads, dtype: torch.dtype, tolerance: float, device: str = "cpu", rows: int = 3) -> None:
    """The kernels of one token against the plain steps in float64; other slots stay as they are."""
    from posttrain.engines.native import kernels

    generator = torch.Generator().manual_seed(3)
    slots = torch.cat([torch.randperm(rows + 2, generator=generator)[:rows], torch.tensor([rows + 2] * 2)]).to(device)
    live = slots[:rows]
    inputs = random_inputs(rows + 2, heads, dtype, device, seed=4)
    pool = torch.randn(rows + 3, heads.values, heads.key_width, heads.value_width, generator=generator).to(device)
    pool[-1] = float("nan")
    first = pool.clone()
    wide = torch.cat([inputs[0].flatten(1), inputs[1].flatten(1)], 1)  # queries and keys are parts of wider rows
    views = [part.unflatten(1, (heads.keys, -1)) for part in wide.chunk(2, 1)]
    out = kernels.recurrence_step(pool, slots, *views, *inputs[2:], unit=heads.corrects)
    exact = in_exact_types(*(None if x is None else x[:rows].double() for x in inputs), unit=heads.corrects)
    expected, after = recurrence_step(first.double()[live], *exact)
    assert out.isfinite().all(), "padding too"
    assert (out[:rows].double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert (pool[live].double() - after).abs().max() <= 1e-5 * after.abs().max()
    first[live] = pool[live]
    assert torch.equal(pool.nan_to_num(7.0), first.nan_to_num(7.0))

    channels = 40
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype).to(device)
                       for s in ((rows + 2, channels), (channels, 4), (channels,)))  # fmt: skip
    pool = torch.randn(rows + 3, 3, channels, generator=generator).to(dtype).to(device)
    pool[-1] = float("nan")
    first = pool.clone()
    for some_bias, silu in ((bias, True), (None, False)):
        pool = first.clone()
        out = kernels.convolution_step(pool, slots, x, weight, some_bias, silu=silu)
        wide_bias = None if some_bias is None else some_bias.double()
        expected, after = convolution_step(first[live].double(), x[:rows].double(), weight.double(), wide_bias)
        expected = torch.nn.functional.silu(expected) if silu else expected
        assert out.isfinite().all()
        assert (out[:rows].double() - expected).abs().max() <= tolerance * expected.abs().max()
        assert torch.equal(pool[live].double(), after)
        untouched = first.clone()
        untouched[live] = pool[live]
        assert torch.equal(pool.nan_to_num(7.0), untouched.nan_to_num(7.0))
