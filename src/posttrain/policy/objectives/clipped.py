"""The clipped policy-gradient loss of GRPO and its relatives.

PPO's clipped ratio (arXiv:1707.06347) with the group advantages of GRPO (arXiv:2402.03300), separate lower and upper
clips (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729), sequence ratios (GSPO, arXiv:2507.18071), CISPO
(arXiv:2506.13585), and truncated importance sampling for the gap between sampler and trainer. The formulas and the names
of options and metrics are NeMo RL's.

Deviations: where one update is made per step, the policy before the update *is* the policy being updated, so the old
log-probabilities are the current ones without gradient, and no second forward pass is made to find them.

Columns used: mask, advantages, generation_logprobs; prev_logprobs and reference_logprobs where the options need them.
Notation: lc current, lp before the update, lg sampler, lr reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.policy.objectives.reduce import masked_extreme, per_sequence, sequence_ids
from posttrain.types import TokenBatch

EPS = 1e-8  # on denominators, as in NeMo RL, so that a batch with nothing to train on has loss 0


@dataclass(frozen=True)
class ClippedPolicyGradient:
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    disable_ppo_ratio: bool = False
    use_cispo: bool = False

    keeps_groups_whole = False

    @property
    def needs_reference(self) -> bool:
        return self.reference_policy_kl_penalty != 0

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        frame = _Frame(logprobs, batch, self.token_level_loss)
        ratio, clipped, actor = self._actor(frame)
        weight, out_of_bounds = self._importance_weight(frame)
        loss = frame.reduce(weight * actor)
        metrics = self._metrics(frame, ratio, clipped)
        metrics["is_oob_ratio"] = frame.token_mean(out_of_bounds)
        if self.needs_reference:
            kl = self._kl_term(frame)
            loss = loss + self.reference_policy_kl_penalty * frame.reduce(kl)
            metrics["kl_penalty"] = frame.reduce(kl.detach())
        metrics["loss"] = loss.detach()
        return loss, metrics

    # -- the actor ---------------------------------------------------------------------------------------------------

    def _actor(self, frame: _Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Ratio, clipped ratio and loss of each token, before importance weights."""
        lc, advantages = frame.current, frame.advantages
        if self.disable_ppo_ratio:
            return torch.ones_like(lc), torch.ones_like(lc), -advantages * lc
        difference = lc - frame.previous
        if self.sequence_level_importance_ratios:
            difference = frame.sequence_mean(difference)[frame.ids]
        ratio = difference.exp()
        clipped = ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        if self.use_cispo:
            return ratio, clipped, -advantages * clipped.detach() * lc
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if self.ratio_clip_c is not None:
            bounded = torch.minimum(loss, -advantages * self.ratio_clip_c)
            loss = torch.where(advantages < 0, bounded, loss)
        return ratio, clipped, loss

    def _importance_weight(self, frame: _Frame) -> tuple[Tensor, Tensor]:
        """exp(lp - lg), truncated as configured; and which tokens were out of bounds. Never carries a gradient."""
        ones = torch.ones_like(frame.mask)
        if not self.use_importance_sampling_correction:
            return ones, torch.zeros_like(ones)
        gap = frame.previous.detach() - frame.sampler
        if self.sequence_level_importance_ratios:
            weight = per_sequence(gap * frame.mask, frame.ids, frame.num_sequences).exp()[frame.ids]
        else:
            weight = gap.exp()
        weight = torch.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)
        low = self.truncated_importance_sampling_ratio_min or 0.0
        high = self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if kind is None or high is None:
            return weight, torch.zeros_like(ones)
        if kind == "seq-mask-tis":
            mean_ratio = frame.sequence_mean(gap).exp()[frame.ids]
            outside = (mean_ratio < low) | (mean_ratio > high)
            return weight * ~outside, outside.float()
        outside = (weight < low) | (weight > high)
        weight = weight.clamp(low, high) if kind == "tis" else weight * ~outside
        return weight, outside.float()

    # -- the price of leaving the reference -----------------------------------------------------------------------------

    def _kl_term(self, frame: _Frame) -> Tensor:
        lc = frame.current
        log_ratio = frame.reference - lc
        clamped = log_ratio
        factor = (lc - frame.sampler).exp() if self.use_on_policy_kl_approximation else (lc - lc.detach()).exp()
        if self.kl_input_clamp_value is not None:
            clamped = log_ratio.clamp(-self.kl_input_clamp_value, self.kl_input_clamp_value)
            factor = torch.where(clamped == log_ratio, factor, factor.detach())
        kl = kl_estimate(clamped, self.reference_policy_kl_type) * factor
        if self.kl_output_clamp_value is not None:
            kl = kl.clamp(-self.kl_output_clamp_value, self.kl_output_clamp_value)
        return kl

    # -- what to watch ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _metrics(self, frame: _Frame, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
        lc, lp, lg = frame.current, frame.previous, frame.sampler
        kind = self.reference_policy_kl_type
        mixture = torch.logaddexp(lp, lg) - torch.log(torch.tensor(2.0))
        return {
            "probs_ratio": frame.token_mean(ratio),
            "probs_ratio_min": masked_extreme(ratio, frame.mask, largest=False),
            "probs_ratio_max": masked_extreme(ratio, frame.mask, largest=True),
            "probs_ratio_clamped": frame.token_mean(clipped),
            "probs_ratio_clamped_min": masked_extreme(clipped, frame.mask, largest=False),
            "probs_ratio_clamped_max": masked_extreme(clipped, frame.mask, largest=True),
            "token_mult_prob_error": frame.token_mean((lg - lp).abs().exp()),
            "gen_kl_error": frame.token_mean(kl_estimate(lp - lg, kind)),
            "policy_kl_error": frame.token_mean(kl_estimate(lg - lp, kind)),
            "js_divergence_error": frame.token_mean(
                0.5 * kl_estimate(mixture - lg, kind) + 0.5 * kl_estimate(mixture - lp, kind)
            ),
            "sampling_importance_ratio": frame.token_mean((lp - lg).exp()),
            "approx_entropy": frame.token_mean(-(lc - lg).exp() * lc),
        }


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """Schulman's estimators of KL(p || q) from log q - log p at samples of p."""
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


class _Frame:
    """The columns of one micro-batch beside its log-probabilities, and the reductions over them."""

    def __init__(self, logprobs: Tensor, batch: TokenBatch, token_level: bool) -> None:
        device = logprobs.device
        columns = {name: column.to(device) for name, column in batch.columns.items()}
        self.current = logprobs
        self.previous = columns.get("prev_logprobs", logprobs.detach())
        self.sampler = columns["generation_logprobs"]
        self.reference = columns.get("reference_logprobs", logprobs.detach())
        self.advantages = columns["advantages"]
        self.mask = columns["mask"]
        self.ids = sequence_ids(batch, device)
        self.num_sequences = len(batch.responses)
        self._batch = batch
        self._token_level = token_level
        self._lengths = per_sequence(self.mask, self.ids, self.num_sequences)

    def token_mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / (self._batch.num_tokens + EPS)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each sequence."""
        return per_sequence(values * self.mask, self.ids, self.num_sequences) / self._lengths.clamp(min=EPS)

    def reduce(self, values: Tensor) -> Tensor:
        """Token-level: mean over all tokens of the batch. Else: mean over its sequences of their token means."""
        if self._token_level:
            return self.token_mean(values)
        return self.sequence_mean(values).sum() / (self._batch.num_sequences + EPS)
