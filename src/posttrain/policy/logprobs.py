"""Log-probabilities of response tokens from hidden states, in chunks: the logits of a batch never exist at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.policy.autograd import Context
from posttrain.policy.fused.accumulate import add_product
from posttrain.policy.head import OutputHead, project
from posttrain.policy.objectives.distillation import TeacherDivergence
from posttrain.policy.packed import PackedRow
from posttrain.policy.parallel.tensor_group import TensorGroup
from posttrain.policy.runtime import triton_kernels

# One chunk of fp32 logits takes 128 MiB on a CPU. On a GPU 4 GiB: then those of 8,192 tokens of a vocabulary of 128,256
# are one chunk, which the backward pass need not compute again.
_CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**30}


class TokenLogprobs(nn.Module):
    """The model for training: a packed row in, one log-probability per response token out.

    A separate module, so that FSDP can wrap it: the embedding and the output head are then unsharded while it runs.
    Call it, and its backward pass, inside `attention_context(row.attention)`.
    """

    reads_own_token = False  # but the token before, which predicts it

    def __init__(self, model: nn.Module, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = OutputHead(model)
        self.chunk_tokens = chunk_tokens

    def forward(self, row: PackedRow, temperature: float, teaching: Teaching | None = None) -> Tensor:
        """With a teacher, three rows: the log-probabilities; of each token the divergence, or the advantage that stands
        for it if only the sampled token is compared; and its estimate."""
        if teaching is None:
            logprobs = self._own_logprobs(row, temperature)
            return logprobs if row.share is None else row.share.gathered(logprobs)
        both = self._compared(row, temperature, teaching)
        return both if row.share is None else torch.stack([row.share.gathered(part) for part in both])

    def _compared(self, row: PackedRow, temperature: float, teaching: Teaching) -> Tensor:
        hidden = self.head.hidden(row.input_ids, row.position_ids, row.images).index_select(0, row.source)
        hidden = hidden.to(self.head.weight.dtype)
        if (group := self.head.tensor_group) is not None:
            hidden = group.copied(hidden)
        chunk = self.chunk_tokens or max(16, _CHUNK_ELEMENTS[hidden.device.type] // (4 * self.head.vocab_size))
        pieces = zip(hidden.split(chunk), row.targets.split(chunk), teaching.hidden.split(chunk), strict=True)

        def compare(hidden: Tensor, targets: Tensor, taught: Tensor) -> Tensor:
            logits = self.head.logits(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
            with torch.no_grad():
                wanted = teaching.head.logits(taught).to(logits.dtype) / temperature
            logprobs = -F.cross_entropy(logits, targets, reduction="none")
            if teaching.divergence.over == "sampled":
                theirs = -F.cross_entropy(wanted, targets, reduction="none")
                return torch.stack([logprobs, *teaching.divergence.of_sampled(logprobs, theirs)])
            divergence = teaching.divergence.of_logits(logits, wanted)
            return torch.stack([logprobs, divergence, divergence])

        if torch.is_grad_enabled():
            return torch.cat([checkpoint(compare, *piece, use_reentrant=False) for piece in pieces], -1)
        return torch.cat([compare(*piece) for piece in pieces], -1)

    def _own_logprobs(self, row: PackedRow, temperature: float) -> Tensor:
        hidden = self.head.hidden(row.input_ids, row.position_ids, row.images).index_select(0, row.source)
        hidden = hidden.to(self.head.weight.dtype)
        chunk = self.chunk_tokens or max(16, _CHUNK_ELEMENTS[hidden.device.type] // self.head.vocab_size)
        if self.head.is_plain_linear:
            logprobs = _LinearLogprobs.apply(
                hidden,
                self.head.weight,
                self._own_targets(row.targets),
                1.0 / temperature,
                chunk,
                self.head.tensor_group,
            )
            assert isinstance(logprobs, Tensor)
            return logprobs
        pieces = zip(hidden.split(chunk), row.targets.split(chunk), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self._chunk, h, t, temperature, use_reentrant=False) for h, t in pieces])
        return torch.cat([self._chunk(h, t, temperature) for h, t in pieces])

    def _own_targets(self, targets: Tensor) -> Tensor:
        """Which of this rank's rows of the output head a target is; -1 where another rank has it."""
        if (group := self.head.tensor_group) is None:
            return targets
        own = targets - group.first_of(self.head.vocab_size)
        return own.where((own >= 0) & (own < len(self.head.weight)), -1)

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return -F.cross_entropy(self.head.logits(hidden).float() / temperature, targets, reduction="none")


class TeacherStates(nn.Module):
    """A frozen model beside the policy: a packed row in, its hidden states of the response tokens out."""

    reads_own_token = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = OutputHead(model)

    def forward(self, row: PackedRow, temperature: float = 1.0) -> Tensor:
        states = self.head.hidden(row.input_ids, row.position_ids, row.images).index_select(0, row.source)
        return states.to(self.head.weight.dtype)


@dataclass(frozen=True)
class Teaching:
    """What the teacher has computed of one packed row, and what the policy is compared by."""

    hidden: Tensor
    head: OutputHead
    divergence: TeacherDivergence


class _LinearLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T * scale)[targets]. The rows of the weight may be spread over a group of ranks: then
    a target is one of this rank's, or -1.

    The backward pass computes each chunk of logits again; if there is only one, it was kept.
    """

    @staticmethod
    def forward(
        ctx: Context, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int,
        group: TensorGroup | None,
    ) -> Tensor:  # fmt: skip
        keeps_logits = any(ctx.needs_input_grad[:2]) and len(hidden) <= chunk
        pieces, normalisers = [], []
        ctx.logits = None
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _logits(h, weight, scale)
            normaliser, chosen = _row_logprobs(logits, t, scale, group)
            normalisers.append(normaliser)
            pieces.append(chosen)
            if keeps_logits:
                ctx.logits = logits
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalisers))
        ctx.scale, ctx.chunk, ctx.group = scale, chunk, group
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None  # it is used up below
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None  # what is not in the weight's own sum
        # Once also without tokens, as ranks that share rows may be: FSDP needs a gradient on every rank, of zeros.
        for start in range(0, max(len(hidden), 1), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, ctx.scale) if kept is None else kept
            d_logits = _logit_gradient(
                logits, targets[part], normalisers[part], grads[0][part], ctx.scale, hidden.dtype
            )
            del logits
            kept = None
            if grad_hidden is not None:
                alone = ctx.group is None
                grad_hidden[part] = d_logits @ weight if alone else ctx.group.sum_in_place(project(d_logits, weight.T))
            if needs_weight and not add_product([weight], d_logits.T, hidden[part]):
                grad_weight = _add_product(grad_weight, d_logits.T, hidden[part], alone=len(hidden) <= ctx.chunk)
            del d_logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, *, alone: bool) -> Tensor:
    """total + left @ right, in fp32 unless there will be no other product to add."""
    if total is None:
        product = left @ right
        return product if alone else product.float()
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Scaled, except where a kernel will do that on the way."""
    logits = project(hidden, weight)
    return logits if scale == 1.0 or _kernels(logits.device) is not None else logits.mul_(scale)


def _row_logprobs(logits: Tensor, targets: Tensor, scale: float, group: TensorGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row of `_logits`, and the log-probability of its target; over all columns of the group."""
    if group is None:
        return _own_logprobs(logits, targets, scale)
    normalisers, chosen = _own_logprobs(logits, targets.clamp(min=0), scale)
    chosen = (chosen + normalisers).where(targets >= 0, 0.0)
    all_normalisers, all_chosen = group.stacked(torch.stack([normalisers, chosen])).unbind(1)
    whole = all_normalisers.logsumexp(0)
    return whole, all_chosen.sum(0) - whole


def _own_logprobs(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if (kernels := _kernels(logits.device)) is not None:
        return kernels.logprobs(logits, targets, scale)
    # On a CPU a few rows at a time, whose exponentials stay in the cache and out of memory.
    rows = len(logits) if logits.is_cuda else 32
    normalisers = torch.cat([part.logsumexp(-1) for part in logits.split(max(rows, 1))])
    return normalisers, logits.gather(1, targets[:, None]).squeeze(1) - normalisers


def _logit_gradient(
    logits: Tensor, targets: Tensor, normalisers: Tensor, grad: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """d logprob / d logits = onehot(target) - softmax, times grad and scale. Without a kernel built over the logits."""
    if (kernels := _kernels(logits.device)) is not None:
        return kernels.logit_gradient(logits, targets, normalisers, grad, scale, dtype)
    column = (grad.to(logits.dtype) * scale)[:, None]
    d_logits = logits.sub_(normalisers[:, None]).exp_().mul_(-column)
    own = targets.clamp(min=0)[:, None]
    return d_logits.scatter_add_(1, own, column.where(targets[:, None] >= 0, 0.0)).to(dtype)


def _kernels(device: torch.device) -> Any:
    """The module of fused kernels, where they run."""
    return triton_kernels("policy.fused.softmax") if device.type == "cuda" else None
