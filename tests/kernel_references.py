"""What the kernels of the native engine are tested against, slow and obvious; and the cases, on any device.

Used by `unit/generation/interpreted_kernels.py` (Triton's interpreter, on a CPU) and by `gpu/test_paged_attention.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Largest error of an output, in parts of the largest number of its head.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# One token, around pages of 16 and blocks of 64 and 128, several pieces of a split.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 257)


@dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    page_size: int = 16
    lengths: tuple[int, ...] = LENGTHS
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] = ()  # of as many heads, then again from the first
    device: str = "cpu"  # of the sinks

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap}
        if self.sinks:
            of_heads = [self.sinks[head % len(self.sinks)] for head in range(self.heads)]
            options["sinks"] = torch.tensor(of_heads, device=self.device, dtype=torch.bfloat16)
        return options


# One so low that it is no sink, one so high that nothing is left.
SINKS = (-1.0, 2.5, 0.0, -200.0, 6.0)
CASES = {
    "4 query heads per key head": Case(),
    "one key head per query head": Case(heads=4, kv_heads=4, dim=128),
    "2 per key head, dim 96": Case(heads=4, kv_heads=2, dim=96),
    "odd group, odd dim": Case(heads=9, kv_heads=3, dim=80),
    "5 per key head": Case(heads=10, kv_heads=2, dim=16),
    "6 per key head": Case(heads=12, kv_heads=2, dim=32),
    "7 per key head": Case(heads=14, kv_heads=2),
    "8 per key head, one of those": Case(heads=8, kv_heads=1, dim=128),
    "more queries than a tile has rows": Case(heads=40, kv_heads=2),
    "widest head": Case(heads=4, kv_heads=1, dim=256),
    "values narrower than keys": Case(heads=4, kv_heads=2, dim=192, value_dim=128),
    "values wider than keys": Case(heads=4, kv_heads=2, dim=32, value_dim=64),
    "sliding window": Case(window=37),
    "window of a page": Case(window=16),
    "window of one token": Case(window=1),
    "window longer than anything": Case(window=100_000),
    "soft cap": Case(kv_heads=4, dim=128, softcap=5.0),
    "soft cap in a window": Case(heads=4, kv_heads=2, dim=256, softcap=50.0, window=64),
    "sinks": Case(heads=16, kv_heads=2, sinks=SINKS),
    "sinks in a window": Case(heads=8, kv_heads=1, window=37, sinks=SINKS),
    "pages of four tokens": Case(page_size=4),
    "pages of eight tokens": Case(page_size=8),
    "pages of 64 tokens": Case(page_size=64),
    "pages of 256 tokens": Case(page_size=256),
}


@dataclass
class Cache:
    """A query per row, and a cache in which every place that no row can see is not a number."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    groups: list[list[int]] = field(default_factory=list)  # rows that share their first pages
    factors: tuple[Tensor, Tensor] | None = None  # of keys and values in FP8

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.keys, self.values, self.table, self.lengths


def random_cache(
    case: Case, dtype: torch.dtype, device: str, groups: list[list[int]] | None = None, shared: list[int] | None = None
) -> Cache:
    """Pages in random order. Rows of a group have the pages of their first `shared` tokens (whole pages) in common."""
    generator = torch.Generator().manual_seed(case.heads * 1000 + case.dim)
    rows, size = len(case.lengths), case.page_size
    most = max(math.ceil(length / size) for length in case.lengths)
    num_pages = rows * most + 3
    query = torch.randn((rows, case.heads, case.dim), generator=generator)
    keys = torch.randn((num_pages, size, case.kv_heads, case.dim), generator=generator)
    values = torch.randn((num_pages, size, case.kv_heads, case.value_dim or case.dim), generator=generator)
    table = torch.randperm(num_pages, generator=generator)[: rows * most].view(rows, most).contiguous()
    for members, tokens in zip(groups or [], shared or [], strict=True):
        table[members, : tokens // size] = table[members[0], : tokens // size]
    visible = torch.zeros(num_pages, size, dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        for position in range(length):
            visible[table[row, position // size], position % size] = True
    keys[~visible], values[~visible] = float("nan"), float("nan")
    return Cache(
        query.to(device, dtype),
        keys.to(device, dtype),
        values.to(device, dtype),
        table.to(device, torch.int32),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        groups or [],
    )


def in_fp8(cache: Cache) -> tuple[Cache, Cache]:
    """The cache with keys and values in FP8, and what those stand for in float64. Unseen places stay NaN."""
    pools, factors = [], []
    for pool in (cache.keys, cache.values):
        factor = pool.float().abs().amax(-1) / 448
        pools.append((pool.float() / factor[..., None]).to(torch.float8_e4m3fn))
        factors.append(factor)
    meant = [pool.double() * factor.double()[..., None] for pool, factor in zip(pools, factors, strict=True)]
    return (
        replace(cache, keys=pools[0], values=pools[1], factors=(factors[0], factors[1])),
        replace(cache, keys=meant[0], values=meant[1]),
    )


def slow_attention(
    cache: Cache, *, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """In float64, one row and one head at a time, position by position."""
    query, keys, values = (x.double().cpu() for x in (cache.query, cache.keys, cache.values))
    table, page_size, group = cache.table.cpu(), keys.shape[1], query.shape[1] // keys.shape[2]
    out = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for row, length in enumerate(cache.lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        places = [(int(table[row, p // page_size]), p % page_size) for p in range(first, length)]
        for head in range(query.shape[1]):
            k = torch.stack([keys[page, place, head // group] for page, place in places])
            v = torch.stack([values[page, place, head // group] for page, place in places])
            scores = k @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores, v = torch.cat([scores, sinks[head].double().cpu()[None]]), F.pad(v, (0, 0, 0, 1))
            out[row, head] = scores.softmax(0) @ v
    return out


def assert_equal_to_rounding(out: Tensor, expected: Tensor) -> None:
    """Relative to each head's largest number: long sequences average values to small ones."""
    assert out.isfinite().all(), "everything was written"
    error = (out.double().cpu() - expected.cpu()).abs().amax(-1) / expected.cpu().abs().amax(-1)
    assert error.max() < TOLERANCE[out.dtype], f"relative error {error.max():.2e} at {out.dtype}"


# -- rotation ----------------------------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def torch_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in the models of `transformers`: one operator at a time, each rounding to its type; x [rows, heads, dim]."""
    rotated = cos.shape[-1]
    x, rest = x[..., :rotated], x[..., rotated:]
    x = x * cos[:, None] + rotate_half(x) * sin[:, None]
    return torch.cat((x, rest.to(x.dtype)), dim=-1)


def torch_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def chi_square_excess(tokens: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; rare tokens are counted together."""
    tokens, probabilities = tokens.cpu(), probabilities.cpu().double()
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


# -- Triton's interpreter ----------------------------------------------------------------------------------------------


def mend_interpreter() -> None:
    """Triton 3.6 turns arrays of one element into loop bounds with int(), which numpy refuses since 2.4, and rounds to
    FP8 without a carry into the exponent.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def convert_by_torch(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return torch.from_numpy(numpy.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    def patch_with_item(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_with_item, convert_by_torch


def assert_steps_like_torch(kernels: Any, rows: int, device: str) -> None:
    """`places` and `move_on` against the operators that they stand for."""
    generator = torch.Generator().manual_seed(rows)
    table = torch.randint(2**30, (rows, 7), generator=generator, dtype=torch.int32).to(device)
    state = torch.randint(7 * 16, (5, rows + 3), generator=generator)
    state[4] = torch.randint(2, (rows + 3,), generator=generator)
    state = state.to(device)
    token, position, _, index, live = state[:, :rows]
    slots, lengths = kernels.places(table, position, 16)
    pages = table.gather(1, (position // 16)[:, None]).squeeze(1).long()
    assert torch.equal(slots, pages * 16 + position % 16), "beyond 2^31"
    assert lengths.dtype == torch.int32
    assert torch.equal(lengths.long(), position + 1)

    expected = state.clone()
    new = torch.randint(2**40, (rows,), generator=generator).to(device)
    logprobs = torch.randn(rows, generator=generator).to(device)
    drawn = kernels.move_on(token, position, index, live, new, logprobs)
    assert torch.equal(drawn, torch.stack([new.double(), logprobs.double()]))
    expected[0, :rows] = new
    expected[1, :rows] += expected[4, :rows]
    expected[3, :rows] += expected[4, :rows]
    assert torch.equal(state, expected), "and nothing beyond the rows"


def assert_drafts_like_torch(seed: int, device: torch.device) -> None:
    """Random texts of few tokens, so that suffixes match; three steps, each with the texts of the one before."""
    from posttrain.engines.native import drafting, kernels

    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 3, (count,), generator=generator).tolist()

    def number(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=generator))

    width, page_size, scratch = (1, 4, 8, 6)[seed % 4], 4, 50
    groups = [[(tokens(1 + number(1500)), number(2) * 40) for _ in range(1 + number(4))] for _ in range(3)]
    numbers, starts, ranges = drafting.lay_out(groups)
    columns = [
        [start + len(text) - 1, number(40), number(1000), number(50), min(room, number(12)), *span]
        for texts, begun, span in zip(groups, starts, ranges, strict=True)
        for (text, room), start in zip(texts, begun, strict=True)
    ]
    idle = [drafting.MARGIN, 0, 0, 0, 0, drafting.MARGIN, drafting.MARGIN]
    text, state = torch.from_numpy(numbers), torch.tensor([*columns, idle]).T.contiguous()
    table = torch.randint(0, scratch, (state.shape[1], 32), generator=generator, dtype=torch.int32)
    table[:, 8:] = torch.where(torch.rand(state.shape[1], 24, generator=generator) < 0.2, scratch, table[:, 8:])
    ours = text.clone().to(device), state.clone().to(device)
    for _ in range(3):
        expected = drafting.plan_rows(text, state, table, width, page_size, scratch)
        found = kernels.plan_rows(*ours, table.to(device), width, page_size, scratch)
        for name, values in vars(expected).items():
            assert torch.equal(getattr(found, name).cpu(), values), name
        guesses = torch.cat([expected.tokens[:, 1:], torch.zeros(len(expected.tokens), 1, dtype=torch.long)], dim=1)
        wrong = torch.rand(guesses.shape, generator=generator) < 0.2
        drawn = torch.where(wrong, (guesses + 1) % 3, guesses).flatten()
        logprobs = torch.rand(drawn.shape, generator=generator)
        values = drafting.accept(text, state, expected, drawn, logprobs)
        assert torch.equal(kernels.accept(*ours, found, drawn.to(device), logprobs.to(device)).cpu(), values)
        assert torch.equal(ours[0].cpu(), text)
        assert torch.equal(ours[1].cpu(), state)
