"""Log-probabilities from hidden states in chunks: the hand-written backward pass, its precision and its memory."""

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TokenLogprobs, _LinearLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch


def inputs(tokens: int, hidden_size: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator, dtype=torch.float64)


def textbook(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_forward_and_backward_equal_autograd_in_float64(chunk: int, temperature: float) -> None:
    hidden, weight, targets, upstream = inputs(11, 6, 13)
    exact = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = textbook(*exact, targets, temperature)
    expected.backward(upstream)
    ours = hidden.float().requires_grad_(), weight.float().requires_grad_()
    actual = _LinearLogprobs.apply(*ours, targets, 1 / temperature, chunk, None)
    actual.backward(upstream.float())
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=2e-5)


def test_backward_equals_finite_differences() -> None:
    """The logits are fp32 whatever comes in, so the steps are wide and the tolerance is that of fp32."""
    hidden, weight, targets, _ = inputs(4, 3, 5)
    scaled = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: _LinearLogprobs.apply(h, w, targets, 1 / 0.8, 3, None).double(),
        scaled,
        eps=1e-2,
        atol=1e-3,
        rtol=1e-3,
    )


def test_a_frozen_head_gets_no_gradient_and_the_body_still_does() -> None:
    hidden, weight, targets, upstream = inputs(5, 4, 9)
    body, head = hidden.float().requires_grad_(), weight.float()
    _LinearLogprobs.apply(body, head, targets, 1.0, 2, None).backward(upstream.float())
    assert head.grad is None
    exact = hidden.clone().requires_grad_()
    textbook(exact, weight, targets, 1.0).backward(upstream)
    torch.testing.assert_close(body.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_a_bf16_head_adds_its_chunks_up_in_fp32() -> None:
    """512 chunks summed in bf16 would stall once the sum is 256 times a summand."""
    hidden, weight, targets, _ = inputs(512, 8, 6)
    hidden, weight = hidden.abs().bfloat16(), (weight * 0.1).bfloat16()
    targets = torch.zeros_like(targets)
    ours = weight.clone().requires_grad_()
    _LinearLogprobs.apply(hidden, ours, targets, 1.0, 1, None).sum().backward()
    exact = weight.double().requires_grad_()
    textbook(hidden.double(), exact, targets, 1.0).sum().backward()
    assert ours.grad.dtype == torch.bfloat16
    error = (ours.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 1e-2


def test_logprobs_of_a_bf16_model_are_fp32() -> None:
    batch = TokenBatch.build([[3, 4, 5]], [[6, 7], [8]], [0, 0], {"mask": torch.ones(3)})
    row = PackedRow.build(batch, torch.device("cpu"))
    for family in ("llama", "gemma2"):
        model = tiny_model(family, dtype=torch.bfloat16)
        with attention_context(row.attention):
            assert TokenLogprobs(model)(row, 1.0).dtype == torch.float32


class WidestLogits(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary, other than the transposed weight."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size, self.rows = hidden_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.shape[-1] == VOCAB_SIZE:
                rows = tensor.numel() // VOCAB_SIZE
                if rows != self.hidden_size:
                    self.rows = max(self.rows, rows)
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_logits_of_the_whole_batch_never_exist_at_once(family: str) -> None:
    model = tiny_model(family)
    responses = [[5] * 40, [6] * 50]
    batch = TokenBatch.build([[3] * 10], responses, [0, 0], {"mask": torch.ones(90)})
    row = PackedRow.build(batch, torch.device("cpu"))
    with attention_context(row.attention), WidestLogits(model.config.hidden_size) as watched:
        TokenLogprobs(model, chunk_tokens=8)(row, 0.7).sum().backward()
    assert 0 < watched.rows <= 8
