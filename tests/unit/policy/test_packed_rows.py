"""A packed row with shared prompts gives every response the log-probabilities that the stock model gives it alone.

Compared in float64: the two add up in other orders, and in float32 the difference depends on the CPU.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import tiny_models
import torch
from float64 import TOLERANCE, assert_same_gradients, float64
from fused_references import random_batch
from tiny_models import FAMILIES, SLIDING_WINDOW, gradients, packed_logprobs
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import InputError
from posttrain.models import attention_interface
from posttrain.models.attention_interface import attention_context
from posttrain.policy import packed as packed_rows
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedAttention, PackedRow, Segment
from posttrain.policy.recurrence import PackedRecurrence, RowPiece, recurrence_step
from posttrain.types import TokenBatch

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("in_float64")


def tiny_model(family: str, **options: Any) -> PreTrainedModel:
    return tiny_models.tiny_model(family, dtype=torch.float64, **options)


@pytest.fixture(params=[0, 16, 192], ids=["segment by segment", "blocks of a few trees", "one dense block"])
def every_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are dense blocks, long ones go segment by segment: both, and a mixture, on the same rows."""
    monkeypatch.setattr(packed_rows, "_DENSE_BLOCK_TOKENS", request.param)


# Prompts longer and shorter than the sliding window, responses of one token, prompts of one token, groups of one, two
# and four, and responses that are not sorted by prompt.
with float64():
    MIXED = random_batch([7, 2, 1, 12], [4, 9, 1, 3, 2, 6, 1, 11], [0, 1, 0, 3, 1, 0, 2, 0])
    LONG = random_batch([3 * SLIDING_WINDOW], [2 * SLIDING_WINDOW + 1, 3], [0, 0], seed=1)


def alone(stock: nn.Module, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    """Each response with its prompt, on its own, through the model's own forward pass."""
    pieces = []
    for prompt, response in zip(batch.prompt_of, batch.responses, strict=True):
        sequence = torch.cat([batch.prompts[prompt], response])
        logits = stock(input_ids=sequence[None]).logits[0, :-1].float() / temperature
        logprobs = logits.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        pieces.append(logprobs[len(batch.prompts[prompt]) - 1 :])
    return torch.cat(pieces)


def assert_same_logprobs_and_gradients(
    family: str, batch: TokenBatch, temperature: float = 1.0, chunk: int | None = None
) -> None:
    packed, stock = tiny_model(family), tiny_model(family, attention="eager")
    weights = torch.randn(sum(batch.response_lengths), generator=torch.Generator().manual_seed(5))
    expected = alone(stock, batch, temperature)
    (expected * weights).sum().backward()
    row = PackedRow.build(batch, CPU)
    with attention_context(row.attention):
        actual = TokenLogprobs(packed, chunk)(row, temperature)
        (actual * weights).sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert_same_gradients(gradients(packed), gradients(stock))


@pytest.mark.usefixtures("every_layout")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_responses_equal_responses_alone(family: str) -> None:
    assert_same_logprobs_and_gradients(family, MIXED)


def _flash_parts(
    query: Tensor, key: Tensor, cum_q: Tensor, cum_k: Tensor, scale: float, left: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each segment its queries, its keys, and the scores [heads, queries, keys]."""
    for (q0, q1), (k0, k1) in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
        k = key[k0:k1].repeat_interleave(query.shape[1] // key.shape[1], 1)
        behind = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        hidden = (behind < 0) | ((behind > left) & (left >= 0))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(hidden, float("-inf"))


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, *_: object, scale: float,
    window_size_left: int, **__: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for q, k, scores in _flash_parts(query, key, cum_q, cum_k, scale, window_size_left):
        v = value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
        out[q], lse[:, q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
    return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor,
    *_: object, scale: float, window_size_left: int, **__: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the kernel does: softmax weights from the log-sum-exp, and the sum of their gradients from the output."""
    group = query.shape[1] // key.shape[1]
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k, scores in _flash_parts(query, key, cum_q, cum_k, scale, window_size_left):
        weights = (scores - lse[:, q, None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad[q], value[k].repeat_interleave(group, 1))
        of_scores = weights * (of_weights - (grad[q] * out[q]).sum(-1).T[..., None]) * scale
        grads[0][q] = torch.einsum("hqk,khd->qhd", of_scores, key[k].repeat_interleave(group, 1))
        for target, left, right in ((grads[1], of_scores, query[q]), (grads[2], weights, grad[q])):
            target[k] += torch.einsum("hqk,qhd->khd", left, right).unflatten(1, (-1, group)).sum(2)
    return grads


@pytest.mark.parametrize("family", ["gpt-oss", "qwen2-sliding", "deepseek-v3"])
def test_variable_length_attention_equals_responses_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run, with torch's flash attention written out: windows, sinks, values narrower than keys."""
    monkeypatch.setattr(packed_rows, "_varlen_runs", lambda *_: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _flash_forward, "CPU")
        library.impl("_flash_attention_backward", _flash_backward, "CPU")
        for batch in (MIXED, LONG):
            assert_same_logprobs_and_gradients(family, batch)


@pytest.mark.usefixtures("every_layout")
@pytest.mark.parametrize("family", ["mistral", "qwen2-sliding", "gemma2", "gemma3"])
def test_sliding_windows_reach_into_the_shared_prompt_and_no_further(family: str) -> None:
    assert_same_logprobs_and_gradients(family, LONG)


def test_a_row_too_long_for_one_block_gives_the_same_logprobs() -> None:
    """Beside short groups, one whose prompt alone is longer than a dense block."""
    batch = random_batch([5, 210, 3], [7, 30, 1, 20, 9], [0, 1, 1, 1, 2], seed=2)
    assert_same_logprobs_and_gradients("gemma3", batch)


@pytest.mark.parametrize("family", ["mistral", "qwen2-sliding", "gemma2", "gemma3"])
def test_sliding_window_changes_the_result(family: str) -> None:
    """Guards the tests above: with a wide window the same weights give other log-probabilities."""
    narrow, wide = (tiny_model(family, attention="eager", sliding_window=w) for w in (SLIDING_WINDOW, 200))
    with torch.no_grad():
        assert (alone(narrow, LONG) - alone(wide, LONG)).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature_divides_the_logits(family: str, temperature: float) -> None:
    assert_same_logprobs_and_gradients(family, MIXED, temperature=temperature)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunking_the_logits_changes_nothing(family: str, chunk: int) -> None:
    assert_same_logprobs_and_gradients(family, MIXED, temperature=0.9, chunk=chunk)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scoring_without_gradients_gives_the_same_numbers(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        scored = packed_logprobs(model, MIXED, chunk=5)
    torch.testing.assert_close(scored, packed_logprobs(model, MIXED, chunk=5).detach(), rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("every_layout")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_activation_checkpointing_changes_nothing(family: str) -> None:
    plain, checkpointed = tiny_model(family).train(), tiny_model(family).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    row = PackedRow.build(MIXED, CPU)
    for model in (plain, checkpointed):
        with attention_context(row.attention):
            TokenLogprobs(model)(row, 1.0).sum().backward()
    expected = gradients(plain)
    for name, gradient in gradients(checkpointed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.usefixtures("every_layout")
def test_responses_are_independent_of_each_other() -> None:
    model = tiny_model("llama")
    responses = list(MIXED.responses)
    responses[1] = torch.full_like(responses[1], 50)
    changed = TokenBatch.build(MIXED.prompts, responses, MIXED.prompt_of, MIXED.columns)
    with torch.no_grad():
        before = packed_logprobs(model, MIXED).split(MIXED.response_lengths)
        after = packed_logprobs(model, changed).split(MIXED.response_lengths)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        difference = float((a - b).abs().max())
        assert difference > 0.1 if index == 1 else difference <= TOLERANCE


def test_logprobs_are_in_the_order_of_the_responses() -> None:
    model = tiny_model("llama")
    order = [5, 0, 7, 2, 1, 6, 4, 3]
    with torch.no_grad():
        straight = packed_logprobs(model, MIXED).split(MIXED.response_lengths)
        shuffled = MIXED.select(order)
        moved = packed_logprobs(model, shuffled).split(shuffled.response_lengths)
    for place, row in enumerate(order):
        torch.testing.assert_close(moved[place], straight[row], rtol=0, atol=TOLERANCE)


def test_a_row_holds_each_prompt_once_and_no_last_token() -> None:
    row = PackedRow.build(MIXED, CPU)
    prompts = sum(len(prompt) for prompt in MIXED.prompts)
    assert row.num_tokens == prompts + sum(n - 1 for n in MIXED.response_lengths)
    assert torch.equal(row.targets, torch.cat(MIXED.responses))
    assert len(row.source) == sum(MIXED.response_lengths)
    two = PackedRow.build(random_batch([3], [2, 4], [0, 0]), CPU)
    assert two.position_ids[0].tolist() == [0, 1, 2, 3, 3, 4, 5], "positions continue those of the prompt"


@pytest.mark.parametrize("option", ["position_bias", "indices", "block_indices"])
def test_attention_that_would_be_left_out_is_refused(option: str) -> None:
    module = nn.Module()
    module.layer_idx = 0
    states = torch.zeros(1, 2, 3, 4)
    context = attention_context(PackedAttention([Segment(0, 3)], CPU))
    with context, pytest.raises(InputError, match="posttrain does not compute"):
        attention_interface._attend(module, states, states, states, None, **{option: torch.zeros(1)})


def test_a_model_outside_a_context_refuses_to_run() -> None:
    with pytest.raises(AssertionError, match="attention_context"):
        tiny_model("llama")(input_ids=torch.tensor([[3, 4]]))


# -- the attention function itself, against a full matrix of scores ----------------------------------------------------


@pytest.mark.usefixtures("every_layout")
@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_equals_a_masked_matrix_over_the_whole_row(window: int | None, softcap: float | None) -> None:
    segments = [Segment(0, 5), Segment(5, 8, 0, 5), Segment(8, 9, 0, 5), Segment(9, 16), Segment(16, 22, 9, 16)]
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, length, head_dim, scale = 4, 2, 22, 8, 0.3
    q = torch.randn(length, heads, head_dim, generator=generator)
    k, v = (torch.randn(length, kv_heads, head_dim, generator=generator) for _ in range(2))
    actual = PackedAttention(segments, CPU).attend(0, q, k, v, scale=scale, window=window, softcap=softcap)

    visible = torch.zeros(length, length, dtype=torch.bool)
    for s in segments:
        keys = [*range(s.prefix_start, s.prefix_end), *range(s.start, s.end)]
        for offset, at in enumerate(range(s.start, s.end)):
            here = s.prefix_length + offset
            for position, key in enumerate(keys):
                visible[at, key] = position <= here and (window is None or here - position < window)
    for head in range(heads):
        scores = q[:, head].double() @ k[:, head // 2].double().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // 2].double()
        torch.testing.assert_close(actual[:, head].double(), expected, rtol=0, atol=TOLERANCE)


def test_chunks_of_a_recurrence_are_its_steps() -> None:
    """Pieces of several chunks, of one, and of a single token; two that follow a prompt; with and without a state
    before; gradients too."""
    generator = torch.Generator().manual_seed(0)
    lengths, follows = [130, 1, 70, 64, 3], [None, None, None, 2, 2]
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    pieces = [RowPiece(s, s + n, f) for s, n, f in zip(starts, lengths, follows, strict=True)]
    packed, total = PackedRecurrence(pieces, CPU), sum(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(total, *shape, generator=generator, dtype=torch.float64)

    query, key, value = random(2, 5), torch.nn.functional.normalize(random(2, 5), dim=-1), random(4, 3)
    decay, beta = -random(4).abs(), random(4).sigmoid()
    before = torch.randn(len(pieces), 4, 5, 3, generator=generator, dtype=torch.float64)
    for rate in (beta, None):
        inputs = [x.clone().requires_grad_() for x in (query, key, value, decay)]
        out, ends = packed.recur(*inputs, rate, before)
        state: dict[int, Tensor] = {}
        again = [x.clone().requires_grad_() for x in (query, key, value, decay)]
        rows = []
        for at, piece in enumerate(pieces):
            state[at] = before[at] if piece.follows is None else state[piece.follows]
            for token in range(piece.start, piece.end):
                one = [x[token][None] for x in again]
                row, after = recurrence_step(state[at][None], *one, None if rate is None else rate[token][None])
                rows.append(row[0])
                state[at] = after[0]
        expected, expected_ends = torch.stack(rows), torch.stack([state[at] for at in range(len(pieces))])
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(ends, expected_ends, rtol=0, atol=1e-12)
        (out.square().sum() + ends.sum()).backward()
        (expected.square().sum() + expected_ends.sum()).backward()
        for ours, theirs in zip(inputs, again, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
