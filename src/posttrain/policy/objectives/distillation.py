"""On-policy distillation: the policy samples, and a teacher says how likely it finds each token (arXiv:2306.13649).

Per response token, with s the policy's and t the teacher's distribution of it:

    reverse   KL(s || t) = sum of s log(s/t)        forward   KL(t || s) = sum of t log(t/s)
    jsd       KL(t || m) / 2 + KL(s || m) / 2,      m = (s + t) / 2

The sum is over the whole vocabulary, or over the teacher's `top_k` tokens and one class for all others, which bounds
the divergence from below. Over the sampled token alone, the divergence is estimated, and its gradient is that of
-A log s with A = log r (reverse), r (forward) or log((1 + r) / 2) / 2 (jsd), r = t/s: in expectation over s, the
gradient of the sum over the vocabulary.

That expectation is over the policy as it is. Where an earlier one sampled the token, A takes the place of the advantage
in the loss of GRPO, with its ratio, clipping and importance weights. A is clamped to +-`kl_output_clamp_value`: r has
no bound.

The mean is over all trained tokens of the batch. With `reward_weight` the policy-gradient loss of GRPO is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.policy.objectives.clipped import EPS, ClippedPolicyGradient, LossColumns
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class TeacherDivergence:
    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    over: Literal["vocabulary", "top_k", "sampled"] = "vocabulary"
    top_k: int = 64

    def of_logits(self, student: Tensor, teacher: Tensor) -> Tensor:
        """One value per row, with the gradient of the student's logits. Either may have columns that the other lacks,
        which pad the output layer: they are left out."""
        width = min(student.shape[-1], teacher.shape[-1])
        s, t = student[..., :width].log_softmax(-1), teacher[..., :width].log_softmax(-1)
        if self.over == "top_k" and self.top_k < width:
            chosen = t.topk(self.top_k, -1).indices
            s, t = _with_rest(s.gather(-1, chosen)), _with_rest(t.gather(-1, chosen))
        if self.kind == "reverse":
            return _kl(s, t)
        if self.kind == "forward":
            return _kl(t, s)
        middle = torch.logaddexp(s, t) - math.log(2)
        return (_kl(t, middle) + _kl(s, middle)) / 2

    def of_sampled(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """From log-probabilities of sampled tokens: the advantage of each, without gradient, and an estimate."""
        log_ratio = (teacher - student).detach()
        ratio = log_ratio.exp()
        middle = torch.log1p(ratio) - math.log(2)
        if self.kind == "reverse":
            advantage, estimate = log_ratio, -log_ratio
        elif self.kind == "forward":
            advantage, estimate = ratio, ratio * log_ratio
        else:
            advantage, estimate = middle / 2, (ratio * log_ratio - (1 + ratio) * middle) / 2
        return advantage, estimate


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(chosen: Tensor) -> Tensor:
    """Log-probabilities of some classes, and of all others together."""
    most = chosen.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(chosen.dtype).eps)
    return torch.cat([chosen, (-torch.expm1(most)).log()], -1)


@dataclass(frozen=True)
class Distillation(ClippedPolicyGradient):
    """Columns used: those of GRPO's loss; from the trainer `divergence_estimate`, and `compared`: the divergence with
    its gradient, or the advantage of the sampled token."""

    against: TeacherDivergence = TeacherDivergence()
    weight: float = 1.0
    reward_weight: float = 0.0

    def with_gradient(self, batch: TokenBatch) -> TokenBatch:
        return batch  # every token has a divergence

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        rewarded, metrics = super().__call__(logprobs, batch)
        mask, compared = batch.columns["mask"].to(logprobs.device), batch.columns["compared"]
        denominator = batch.num_tokens + EPS
        if self.against.over == "sampled":
            if (bound := self.config.kl_output_clamp_value) is not None:
                compared = compared.clamp(-bound, bound)
            frame = LossColumns(logprobs, batch.with_columns(advantages=compared), denominator)
            taught, _, of_teacher = self._policy_gradient(frame)
            metrics = metrics if self.reward_weight else {**metrics, **of_teacher}
        else:
            taught = (compared * mask).sum() / denominator
        loss = self.weight * taught
        if self.reward_weight:
            loss = loss + self.reward_weight * rewarded
        measured = (batch.columns["divergence_estimate"] * mask).sum() / denominator
        return loss, {**metrics, "divergence": measured.detach(), "loss": loss.detach()}
