"""The paged cache and attention over it, against attention over plain sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.engines.native.attention import (
    DenseDecode,
    PagedDecode,
    PrefillAttention,
    PrefillPiece,
    gathered_attention,
)
from posttrain.engines.native.kv_cache import LayerShape, PagedKvCache, num_pages_for_call, zeros
from posttrain.engines.native.scheduler import PromptGroup, Sample
from posttrain.errors import InputError
from posttrain.types import Task

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4
SCALE = 0.4


def slow_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """The last len(q) tokens of a sequence over all of it, head by head and token by token, in float64."""
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    for row in range(len(q)):
        position = len(k) - len(q) + row
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            scores = k[first : position + 1, kv].double() @ q[row, head].double() * SCALE
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v[first : position + 1, kv].double()
    return out


def make_cache(num_pages: int = 40, value_dim: int = DIM) -> PagedKvCache:
    return PagedKvCache({0: LayerShape(KV_HEADS, DIM, value_dim, torch.float32)}, num_pages, PAGE, CPU)


def tokens(length: int, seed: int, value_dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim))
    q, k, v = (torch.randn((length, *shape), generator=generator) for shape in shapes)
    return q, k, v


VARIANTS = pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (5, 1.5)])


@VARIANTS
def test_packed_prompts_attend_to_themselves_and_are_cached(window: int | None, softcap: float | None) -> None:
    cache = make_cache()
    first, second = tokens(7, 0), tokens(9, 1)
    pieces = [PrefillPiece(0, 7, 0, (5, 2)), PrefillPiece(7, 9, 0, (9, 1, 7))]
    q, k, v = (torch.cat(parts) for parts in zip(first, second, strict=True))
    out = PrefillAttention(cache, pieces).attend(0, q, k, v, scale=SCALE, window=window, softcap=softcap)
    expected = torch.cat([slow_attention(*first, window, softcap), slow_attention(*second, window, softcap)])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for (_, k, v), pages in ((first, (5, 2)), (second, (9, 1, 7))):
        keys, values = cache.read(0, torch.from_numpy(cache.slots(pages, 0, len(k))), k.dtype)
        assert torch.equal(keys, k)
        assert torch.equal(values, v)


@VARIANTS
@pytest.mark.parametrize("cuts", [(4,), (3, 5), (1, 2, 10)])
def test_prompt_in_pieces_equals_the_prompt_at_once(
    cuts: tuple[int, ...], window: int | None, softcap: float | None
) -> None:
    cache = make_cache()
    sequence, other = tokens(11, 2), tokens(5, 3)
    outputs = []
    for begin, end in zip((0, *cuts), (*cuts, 11), strict=True):
        # Beside the piece goes a whole prompt, which must not be disturbed.
        pieces = [PrefillPiece(0, 5, 0, (20, 21)), PrefillPiece(5, end - begin, begin, (6, 3, 8))]
        q, k, v = (torch.cat([b, a[begin:end]]) for a, b in zip(sequence, other, strict=True))
        out = PrefillAttention(cache, pieces).attend(0, q, k, v, scale=SCALE, window=window, softcap=softcap)
        outputs.append(out[5:])
        torch.testing.assert_close(out[:5].double(), slow_attention(*other, window, softcap), atol=1e-5, rtol=1e-5)
    expected = slow_attention(*sequence, window, softcap)
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=1e-5, rtol=1e-5)


def active_sample(
    cache: PagedKvCache, prompt: tuple[Tensor, Tensor, Tensor], pages: list[int], admission: int
) -> Sample:
    length = len(prompt[0])
    PrefillAttention(cache, [PrefillPiece(0, length, 0, pages)]).attend(
        0, *prompt, scale=SCALE, window=None, softcap=None
    )
    group = PromptGroup(Task(0, "t", "", tuple(range(length))), 50)
    return Sample(group, 0, noise_key=0, token_ids=[1], pages=pages, admission=admission)


@VARIANTS
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_decoding_equals_attention_over_the_whole_sequence(
    kind: str, window: int | None, softcap: float | None
) -> None:
    """Three sequences, one of which leaves while another one joins, over enough steps for rows to grow."""
    cache = make_cache(num_pages=200)
    decode = DenseDecode(cache, 100) if kind == "dense" else PagedDecode(cache, 3, 40)
    histories = [tokens(length, seed) for seed, length in enumerate((3, 8, 13, 6))]
    samples = [active_sample(cache, h, [30 + 5 * i + j for j in range(4)], i) for i, h in enumerate(histories)]
    free = iter(range(60, 200))
    for step in range(70):
        # The second one leaves at step 5: the third takes its row and the fourth joins.
        rows = [0, 1, 2] if step < 5 else [0, 2, 3]
        batch = [samples[row] for row in rows]
        for sample in batch:
            if sample.num_cached >= len(sample.pages) * PAGE:
                sample.pages.append(next(free))
        slots = [s.pages[s.num_cached // PAGE] * PAGE + s.num_cached % PAGE for s in batch]
        new = [tokens(1, 1000 + 10 * step + row) for row in rows]
        q, k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
        decode.prepare(batch, torch.tensor(slots))
        out = decode.attend(0, q, k, v, scale=SCALE, window=window, softcap=softcap)
        for place, row in enumerate(rows):
            history = tuple(torch.cat(parts) for parts in zip(histories[row], new[place], strict=True))
            histories[row] = history  # type: ignore[call-overload]
            expected = slow_attention(history[0][-1:], history[1], history[2], window, softcap)[0]
            torch.testing.assert_close(out[place].double(), expected, atol=1e-5, rtol=1e-5)
            samples[row].token_ids.append(1)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_overflowing_sequence_does_not_affect_the_padding_of_another(kind: str) -> None:
    """What a mask hides meets a factor of 0, and 0 * inf is nan: padding is no page of a sequence, now or before."""
    cache = make_cache()
    decode = DenseDecode(cache, 100) if kind == "dense" else PagedDecode(cache, 3, 8)
    long, short = tokens(9, 0), tokens(2, 1)
    samples = [
        active_sample(cache, history, pages, admission)
        for admission, (history, pages) in enumerate([(long, [3, 4, 5]), (short, [6]), (tokens(5, 2), [0, 1])])
    ]
    infinite = tuple(torch.full_like(part, torch.inf) for part in tokens(1, 3))
    cache.write(0, torch.arange(2 * PAGE), *(part.expand(2 * PAGE, -1, -1) for part in infinite[1:]))
    # A table of pages is kept: the short one comes where the overflowing one was. (A session throws dense copies away
    # then.)
    for rows in ([0, 2], [0, 1]) if kind == "paged" else ([0, 1],):
        batch = [samples[row] for row in rows]
        slots = torch.tensor([s.pages[s.num_cached // PAGE] * PAGE + s.num_cached % PAGE for s in batch])
        q, k, v = (torch.cat([part, part]) for part in tokens(1, 4))
        decode.prepare(batch, slots)
        out = decode.attend(0, q, k, v, scale=SCALE, window=None, softcap=None)
    expected = slow_attention(q[-1:], torch.cat([short[1], k[-1:]]), torch.cat([short[2], v[-1:]]), None, None)
    torch.testing.assert_close(out[1:].double(), expected, atol=1e-5, rtol=1e-5)


def test_values_may_be_narrower_than_keys() -> None:
    cache = make_cache(value_dim=5)
    prompt = tokens(6, 0, value_dim=5)
    sample = active_sample(cache, prompt, [1, 2], 0)
    new = tokens(1, 1, value_dim=5)
    decode = DenseDecode(cache, 20)
    decode.prepare([sample], torch.tensor([2 * PAGE + 2]))
    out = decode.attend(0, *new, scale=SCALE, window=None, softcap=None)
    q, k, v = (torch.cat(parts) for parts in zip(prompt, new, strict=True))
    torch.testing.assert_close(out.double(), slow_attention(q[-1:], k, v, None, None), atol=1e-5, rtol=1e-5)


def test_gathered_attention_ignores_positions_beyond_a_row() -> None:
    q, k, v = tokens(10, 4)
    keys, values = torch.zeros(6, PAGE, KV_HEADS, DIM), torch.zeros(6, PAGE, KV_HEADS, DIM)
    for position in range(10):
        page = (4, 1, 3)[position // PAGE]
        keys[page, position % PAGE], values[page, position % PAGE] = k[position], v[position]
    keys[0], values[0] = 1e4, -1e4
    table = torch.tensor([[4, 1, 3], [4, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([10, 3], dtype=torch.int32)
    out = gathered_attention(q[[9, 2]], keys, values, table, lengths, scale=SCALE, window=None, softcap=None)
    torch.testing.assert_close(out[0].double(), slow_attention(q[9:], k, v, None, None)[0], atol=1e-5, rtol=1e-5)
    short = slow_attention(q[2:3], k[:3], v[:3], None, None)[0]
    torch.testing.assert_close(out[1].double(), short, atol=1e-5, rtol=1e-5)


def test_copied_pages_are_independent_of_the_original() -> None:
    cache = make_cache()
    _, k, v = tokens(4, 5)
    cache.write(0, torch.arange(8, 12), k, v)
    cache.copy_pages([(2, 7), (2, 9)])
    cache.write(0, torch.tensor([7 * PAGE]), torch.zeros(1, KV_HEADS, DIM), torch.zeros(1, KV_HEADS, DIM))
    assert torch.equal(cache.keys[0][9], k)
    assert torch.equal(cache.keys[0][2], k)
    assert torch.equal(cache.values[0][7][1:], v[1:])
    assert cache.keys[0][7][0].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_zeros_and_can_be_written(dtype: torch.dtype) -> None:
    tensor = zeros((3, 5), dtype, CPU)
    assert tensor.dtype == dtype
    assert tensor.count_nonzero() == 0
    tensor[1, 2] = 1.5
    assert tensor.sum().item() == 1.5


# One layer of this shape takes 1 MiB per page of 16 tokens; on a CPU the dense copy takes as much again.
LAYERS = {0: LayerShape(num_heads=8, key_dim=1024, value_dim=1024, dtype=torch.float32)}


@pytest.mark.parametrize(
    ("gib", "wanted", "least", "pages"),
    [
        *((None, 100, 5, 100), (None, 10_000, 5, 1024), (0.5, 100, 5, 100), (0.5, 10_000, 5, 256)),
        *((4.0, 10_000, 5, 2048), (None, 5_000, 5_000, 5_000)),  # without a budget one sequence always fits
    ],
)
def test_cache_size_is_limited_by_the_budget(gib: float | None, wanted: int, least: int, pages: int) -> None:
    assert num_pages_for_call(LAYERS, 16, gib, CPU, wanted=wanted, least=least) == pages


def test_budget_below_one_sequence_is_refused_by_name() -> None:
    # 100 pages of 2 MiB
    with pytest.raises(InputError, match=r"0\.195 GiB of KV cache.*raise kv_cache_gib"):
        num_pages_for_call(LAYERS, 16, 0.1, CPU, wanted=200, least=100)
