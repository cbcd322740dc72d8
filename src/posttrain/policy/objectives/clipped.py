"""The clipped policy-gradient loss of GRPO and its variants.

PPO's clipped ratio (arXiv:1707.06347) with the group advantages of GRPO (arXiv:2402.03300), separate lower and upper
clips (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729), sequence ratios (GSPO, arXiv:2507.18071), CISPO
(arXiv:2506.13585), SAPO (arXiv:2511.20347), GMPO (arXiv:2507.20673), DPPO in its binary forms (arXiv:2602.04879), the
likelihood term of VAPO (arXiv:2504.05118), and truncated importance sampling for the gap between sampler and trainer.
The formulas and the names of options and metrics are NeMo RL's; options that it does not
have make the numbers of other systems reproducible.

Deviations: where one update is made per step, the policy before the update *is* the policy being updated, so the old
log-probabilities are the current ones without gradient, and no second forward pass is made to find them. VAPO's term is
divided by the rewarded tokens of the whole batch, not of the micro-batch. DPPO's divergence is from the policy before
the step, as in verl; the paper's is from the sampler.

Columns used: mask, advantages, generation_logprobs; prev_logprobs (the current ones where prev_is_current is 1),
reference_logprobs and rewarded where the options need them. Notation: lc current, lp before the update, lg sampler, lr
reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.config import LossFnConfig
from posttrain.policy.objectives.kl import kl_estimate
from posttrain.policy.objectives.reduce import masked_extreme, per_sequence, sequence_ids
from posttrain.types import TokenBatch

EPS = 1e-8  # on denominators, as in NeMo RL, so that a batch with nothing to train on has loss 0


@dataclass(frozen=True)
class ClippedPolicyGradient:
    config: LossFnConfig

    keeps_groups_whole = False

    @property
    def needs_reference(self) -> bool:
        return self.config.reference_policy_kl_penalty != 0

    def with_gradient(self, batch: TokenBatch) -> TokenBatch:
        """The batch without the rows whose share of the loss and of its gradient is exactly 0, whatever the policy: all
        their tokens are masked, or have advantage 0 and no other term.
        """
        counts = batch.columns["mask"] != 0
        if not self.needs_reference:
            has_term = batch.columns["advantages"] != 0
            if "returns" in batch.columns:  # the critic learns from it
                has_term |= batch.columns["returns"] != batch.columns["values"]
            if self.config.positive_example_nll_weight:
                has_term |= batch.columns["rewarded"] != 0
            counts &= has_term
        of_rows = per_sequence(counts.float(), sequence_ids(batch, counts.device), len(batch.responses))
        return batch.only(of_rows.nonzero().flatten().tolist())

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        frame = LossColumns(logprobs, batch, self._denominator(batch))
        loss, ratio, metrics = self._policy_gradient(frame)
        if self.needs_reference:
            kl = self._kl_term(frame, ratio)
            loss = loss + self.config.reference_policy_kl_penalty * frame.reduce(kl)
            metrics["kl_penalty"] = frame.reduce(kl.detach())
        if self.config.positive_example_nll_weight:
            # The column adds up to 1 over the whole batch: a mean with the global denominator.
            nll = -(logprobs * batch.columns["rewarded"].to(logprobs.device)).sum()
            loss = loss + self.config.positive_example_nll_weight * nll
            metrics["positive_nll_loss"] = nll.detach()
        metrics["loss"] = loss.detach()
        return loss, metrics

    def _policy_gradient(self, frame: LossColumns) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss by the frame's advantages, the ratio of each token, and metrics."""
        ratio, clipped, actor = self._actor(frame)
        weight, out_of_bounds = self._importance_weight(frame)
        metrics = self._metrics(frame, ratio, clipped)
        metrics["is_oob_ratio"] = frame.token_mean(out_of_bounds)
        return frame.reduce(weight * actor), ratio, metrics

    def _denominator(self, batch: TokenBatch) -> float | None:
        """What a sum over tokens is divided by; None stands for means within sequences, averaged over sequences."""
        normalizer = self.config.loss_normalizer or ("tokens" if self.config.token_level_loss else "sequences")
        if normalizer == "sequences":
            return None
        if normalizer == "tokens":
            return batch.num_tokens + EPS
        assert self.config.max_response_tokens is not None, "the config has checked it"
        return batch.num_sequences * self.config.max_response_tokens + EPS

    # -- the actor ---------------------------------------------------------------------------------------------------

    def _actor(self, frame: LossColumns) -> tuple[Tensor, Tensor, Tensor]:
        """Ratio, clipped ratio and loss of each token, before importance weights."""
        lc, advantages = frame.current, frame.advantages
        if self.config.disable_ppo_ratio:
            return torch.ones_like(lc), torch.ones_like(lc), -advantages * lc
        difference = lc - frame.previous
        if self.config.sequence_level_importance_ratios:
            whole = frame.sequence_mean if self.config.sequence_ratio_type == "geometric_mean" else frame.sequence_sum
            difference = whole(difference)[frame.ids]
        if self.config.log_ratio_clamp_value is not None:
            difference = difference.clamp(-self.config.log_ratio_clamp_value, self.config.log_ratio_clamp_value)
        ratio = difference.exp()
        bounded_ratio = ratio if self.config.ratio_ceiling is None else ratio.clamp(max=self.config.ratio_ceiling)
        match self.config.trust_region:
            case "soft":
                positive, negative = self.config.soft_temperature_pos, self.config.soft_temperature_neg
                steepness = torch.where(advantages > 0, positive, negative).to(lc.dtype)
                gate = 4 / steepness * torch.sigmoid(steepness * (ratio - 1))
                return ratio, ratio, -advantages * gate
            case "geometric_mean":
                near = difference.clamp(-self.config.ratio_clip_min, self.config.ratio_clip_max)
                worse = torch.where(advantages > 0, torch.minimum(difference, near), torch.maximum(difference, near))
                return ratio, near.exp(), -advantages * frame.sequence_mean(worse).exp()[frame.ids]
            case "tv" | "kl":
                keeps = self._is_near(frame)
                return ratio, torch.where(keeps, ratio, 1.0), -advantages * bounded_ratio.detach() * lc * keeps
        clipped = ratio.clamp(1 - self.config.ratio_clip_min, 1 + self.config.ratio_clip_max)
        if self.config.use_cispo:
            return ratio, clipped, -advantages * clipped.detach() * lc
        loss = torch.maximum(-advantages * bounded_ratio, -advantages * clipped)
        if self.config.ratio_clip_c is not None:
            bounded = torch.minimum(loss, -advantages * self.config.ratio_clip_c)
            loss = torch.where(advantages < 0, bounded, loss)
        return ratio, clipped, loss

    @torch.no_grad()
    def _is_near(self, frame: LossColumns) -> Tensor:
        """DPPO: of each token, whether an update in the direction of its advantage stays near the policy before. Of all
        other tokens together only the probability is known: the divergence is of two outcomes.
        """
        now, before = frame.current.exp(), frame.previous.exp()
        rises = frame.advantages > 0
        limit = torch.where(rises, self.config.ratio_clip_max, self.config.ratio_clip_min)
        if self.config.trust_region == "tv":
            divergence = (now - before).abs()
        else:
            others = ((1 - before + EPS) / (1 - now + EPS)).log()
            divergence = before * (frame.previous - frame.current) + (1 - before) * others
        moves_back = torch.where(rises, now <= before, now >= before)
        return moves_back | (divergence <= limit)

    def _importance_weight(self, frame: LossColumns) -> tuple[Tensor, Tensor]:
        """exp(lp - lg), truncated as configured; and which tokens were out of bounds. Never carries a gradient."""
        ones = torch.ones_like(frame.mask)
        if not self.config.use_importance_sampling_correction:
            return ones, torch.zeros_like(ones)
        gap = frame.previous.detach() - frame.sampler
        if self.config.sequence_level_importance_ratios:
            weight = frame.sequence_sum(gap).exp()[frame.ids]
        else:
            weight = gap.exp()
        weight = torch.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)
        low = self.config.truncated_importance_sampling_ratio_min or 0.0
        high = self.config.truncated_importance_sampling_ratio
        kind = self.config.truncated_importance_sampling_type
        if kind is None or high is None:
            return weight, torch.zeros_like(ones)
        if kind == "seq-mask-tis":
            mean_ratio = frame.sequence_mean(gap).exp()[frame.ids]
            outside = (mean_ratio < low) | (mean_ratio > high)
            return weight * ~outside, outside.float()
        outside = (weight < low) | (weight > high)
        weight = weight.clamp(low, high) if kind == "tis" else weight * ~outside
        return weight, outside.float()

    # -- the price of leaving the reference ----------------------------------------------------------------------------

    def _kl_term(self, frame: LossColumns, ratio: Tensor) -> Tensor:
        lc = frame.current
        log_ratio = frame.reference - lc
        clamped = log_ratio
        factor = self._kl_weight(frame, ratio)
        if self.config.kl_input_clamp_value is not None:
            clamped = log_ratio.clamp(-self.config.kl_input_clamp_value, self.config.kl_input_clamp_value)
            factor = torch.where(clamped == log_ratio, factor, factor.detach())
        kl = kl_estimate(clamped, self.config.reference_policy_kl_type) * factor
        if self.config.kl_output_clamp_value is not None:
            kl = kl.clamp(-self.config.kl_output_clamp_value, self.config.kl_output_clamp_value)
        return kl

    def _kl_weight(self, frame: LossColumns, ratio: Tensor) -> Tensor:
        """The importance weight of the estimate under the current policy. `on_policy` is 1 with a non-zero gradient."""
        lc = frame.current
        kind = self.config.kl_importance_weight or (
            "sampler" if self.config.use_on_policy_kl_approximation else "on_policy"
        )
        if kind == "sampler":
            return (lc - frame.sampler).exp()
        if kind == "previous":
            return ratio
        return (lc - lc.detach()).exp() if kind == "on_policy" else torch.ones_like(lc)

    # -- what to watch ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _metrics(self, frame: LossColumns, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
        lc, lp, lg = frame.current, frame.previous, frame.sampler
        kind = self.config.reference_policy_kl_type
        mixture = torch.logaddexp(lp, lg) - torch.log(torch.tensor(2.0))
        pushed = torch.where(frame.advantages > 0, ratio > clipped, ratio < clipped) & (frame.advantages != 0)
        return {
            "policy_shift_kl": frame.token_mean(kl_estimate(lc - lp, "k3")),
            "advantage_weighted_shift": frame.token_mean(frame.advantages * (lc - lp)),
            "clip_fraction": frame.token_mean(pushed.float()),
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
            "sampling_importance_square": frame.token_mean((2 * (lp - lg)).exp()),
            "approx_entropy": frame.token_mean(-(lc - lg).exp() * lc),
        }


@dataclass(frozen=True)
class ValueLoss:
    """PPO's loss of a critic: half the squared error of its values, which are clipped to within `cliprange` of the
    values before the step where that makes the error larger. The mean over all trained tokens of the batch.

    Columns used: mask, values, returns.
    """

    scale: float = 1.0
    cliprange: float | None = 0.2

    keeps_groups_whole = False

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        values = logprobs  # a critic gives values in their place
        before, returns, mask = (batch.columns[name].to(values.device) for name in ("values", "returns", "mask"))
        errors = (values - returns).square()
        is_clipped = torch.zeros_like(errors, dtype=torch.bool)
        if self.cliprange is not None:
            near = before + (values - before).clamp(-self.cliprange, self.cliprange)
            clipped = (near - returns).square()
            is_clipped = clipped > errors
            errors = torch.maximum(errors, clipped)
        loss = 0.5 * self.scale * (errors * mask).sum() / (batch.num_tokens + EPS)
        share = (is_clipped * mask).sum() / (batch.num_computed_tokens + EPS)
        return loss, {"value_loss": loss.detach(), "value_clip_fraction": share}


class LossColumns:
    """The columns of one micro-batch beside its log-probabilities, and the reductions over them."""

    def __init__(self, logprobs: Tensor, batch: TokenBatch, denominator: float | None) -> None:
        device = logprobs.device
        columns = {name: column.to(device) for name, column in batch.columns.items()}
        self.current = logprobs
        before = columns.get("prev_logprobs", logprobs.detach())
        if (is_current := columns.get("prev_is_current")) is not None:
            before = torch.where(is_current != 0, logprobs.detach(), before)
        self.previous = before
        self.reference = columns.get("reference_logprobs", logprobs.detach())
        self.advantages = columns["advantages"]
        self.mask = columns["mask"]
        # Tokens of the environment have no sampler log-probability; a 0 there would overflow in exp.
        self.sampler = torch.where(self.mask != 0, columns["generation_logprobs"], self.previous.detach())
        self.ids = sequence_ids(batch, device)
        self.num_sequences = len(batch.responses)
        self._batch = batch
        self._denominator = denominator
        self._lengths = per_sequence(self.mask, self.ids, self.num_sequences)

    def token_mean(self, values: Tensor) -> Tensor:
        """For metrics: over the tokens that were computed."""
        return (values * self.mask).sum() / (self._batch.num_computed_tokens + EPS)

    def sequence_sum(self, values: Tensor) -> Tensor:
        return per_sequence(values * self.mask, self.ids, self.num_sequences)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each sequence."""
        return self.sequence_sum(values) / self._lengths.clamp(min=EPS)

    def reduce(self, values: Tensor) -> Tensor:
        """The sum over all tokens by the denominator, or else the mean over sequences of their token means."""
        if self._denominator is not None:
            return (values * self.mask).sum() / self._denominator
        return self.sequence_mean(values).sum() / (self._batch.num_sequences + EPS)
