"""Log-probabilities of response tokens, from hidden states, a chunk at a time: the logits of a batch never exist at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.policy.head import OutputHead, project
from posttrain.policy.packed import PackedRow

# One chunk of fp32 logits takes 128 MiB.
_CHUNK_ELEMENTS = 2**25


class TokenLogprobs(nn.Module):
    """The model as training sees it: a packed row in, one log-probability per response token out.

    A module of its own, so that sharding can wrap it: the embedding and the output head are then whole while it runs.
    Call it, and its backward pass, inside `attention_context(row.attention)`.
    """

    reads_own_token = False  # but the token before, which predicts it

    def __init__(self, model: nn.Module, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = OutputHead(model)
        self.chunk_tokens = chunk_tokens

    def forward(self, row: PackedRow, temperature: float) -> Tensor:
        hidden = self.head.hidden(row.input_ids, row.position_ids).index_select(0, row.source)
        hidden = hidden.to(self.head.weight.dtype)
        chunk = self.chunk_tokens or max(16, _CHUNK_ELEMENTS // self.head.vocab_size)
        if self.head.is_plain_linear:
            logprobs = _LinearLogprobs.apply(hidden, self.head.weight, row.targets, 1.0 / temperature, chunk)
            assert isinstance(logprobs, Tensor)
            return logprobs
        pieces = zip(hidden.split(chunk), row.targets.split(chunk), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self._chunk, h, t, temperature, use_reentrant=False) for h, t in pieces])
        return torch.cat([self._chunk(h, t, temperature) for h, t in pieces])

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return -F.cross_entropy(self.head.logits(hidden).float() / temperature, targets, reduction="none")


class _LinearLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T * scale)[targets].

    The backward pass computes each chunk of logits again; if there is only one, it was kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int) -> Tensor:
        keeps_logits = any(ctx.needs_input_grad[:2]) and len(hidden) <= chunk
        pieces, normalisers = [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _scaled_logits(h, weight, scale)
            normalisers.append(_log_sum_exp(logits))
            pieces.append(logits.gather(1, t[:, None]).squeeze(1) - normalisers[-1])
        ctx.logits = logits if keeps_logits else None
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalisers))
        ctx.scale, ctx.chunk = scale, chunk
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None  # it is used up below
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad = (grads[0][part].float() * ctx.scale)[:, None]
            logits = _scaled_logits(hidden[part], weight, ctx.scale) if kept is None else kept
            # d logprob / d logits = onehot(target) - softmax, scaled; built in place over the logits.
            d_logits = logits.sub_(normalisers[part, None]).exp_().mul_(-grad)
            d_logits.scatter_add_(1, targets[part, None], grad)
            d_logits = d_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = d_logits @ weight
            if grad_weight is not None:
                if grad_weight.dtype == hidden.dtype:
                    grad_weight.addmm_(d_logits.T, hidden[part])
                else:
                    grad_weight += d_logits.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Of each row. On a CPU a few rows at a time, whose exponentials stay in the cache and out of memory."""
    rows = len(logits) if logits.is_cuda else 32
    return torch.cat([part.logsumexp(-1) for part in logits.split(max(rows, 1))])


def _scaled_logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    logits = project(hidden, weight)
    return logits if scale == 1.0 else logits.mul_(scale)
