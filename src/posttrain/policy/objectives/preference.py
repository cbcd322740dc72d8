"""Losses of preference pairs, with the options and metric names of NeMo RL and NeMo-Aligner.

Responses come in pairs, chosen then rejected, of one prompt. The reward of a response is the sum (or, with
`preference_average_log_probs`, and always for simpo and orpo, the mean) over its tokens of log p - log p_reference, or
of log p for the losses without a reference; it is *not* multiplied by beta in the metrics. `preference_forms.py` has
the formulas. With equal policy and reference the loss of dpo is ln 2.

Columns used: mask; reference_logprobs, given_rewards (rpo), num_class_tokens (token-level SFT term) where the options
need them. `TokenBatch.num_sequences` counts both responses of a pair.

Correctly ranked pairs and ties are reported as counts, which add up exactly; the algorithm
divides them by the number of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.config import DpoConfig
from posttrain.config.dpo import LOSSES
from posttrain.policy.objectives.preference_forms import pair_losses
from posttrain.policy.objectives.reduce import per_sequence, ranked, sequence_ids, sequence_values
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class PreferenceLoss:
    config: DpoConfig

    keeps_groups_whole = True

    @property
    def needs_reference(self) -> bool:
        return LOSSES[self.config.preference_loss].needs_reference

    @property
    def averages(self) -> bool:
        return self.config.preference_average_log_probs or LOSSES[self.config.preference_loss].always_averages

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        num_pairs = max(batch.num_sequences / 2, 1.0)
        mask = batch.columns["mask"].to(logprobs.device)
        ids, count = sequence_ids(batch, logprobs.device), len(batch.responses)
        lengths = per_sequence(mask, ids, count)
        counts = (lengths[0::2] > 0).float()  # fully masked pairs are excluded

        chosen, rejected = self._rewards(logprobs, batch, mask, ids, lengths)
        losses = pair_losses(
            self.config.preference_loss,
            chosen,
            rejected,
            beta=self.config.reference_policy_kl_penalty,
            given_margin=self._given_margin(batch, logprobs.device),
            label_smoothing=self.config.label_smoothing,
            gamma=self.config.simpo_gamma,
        )
        preference = (losses * counts).sum() / num_pairs
        loss = self.config.preference_loss_weight * preference
        sft = torch.zeros((), device=logprobs.device)
        if self.config.sft_loss_weight > 0:
            sft = self._sft(-per_sequence(logprobs * mask, ids, count), lengths, batch, num_pairs)
            loss = loss + self.config.sft_loss_weight * sft
        own = per_sequence(logprobs * mask, ids, count)
        own = own / lengths.clamp(min=1) if self.averages else own
        is_right, is_tie = ranked(chosen - rejected, own[0::2] + own[1::2])
        metrics = {
            "loss": loss,
            "preference_loss": preference,
            "sft_loss": sft,
            "num_ranked_right": (is_right * counts).sum(),
            "num_ties": (is_tie * counts).sum(),
            "rewards_chosen_mean": chosen.sum() / num_pairs,
            "rewards_rejected_mean": rejected.sum() / num_pairs,
            "rewards_margin_mean": (chosen - rejected).sum() / num_pairs,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _rewards(
        self, logprobs: Tensor, batch: TokenBatch, mask: Tensor, ids: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the chosen and of the rejected answers, without beta."""
        if self.needs_reference:
            logprobs = logprobs - batch.columns["reference_logprobs"].to(logprobs.device)
        rewards = per_sequence(logprobs * mask, ids, len(lengths))
        if self.averages:
            rewards = rewards / lengths.clamp(min=1)
        return rewards[0::2], rewards[1::2]

    def _given_margin(self, batch: TokenBatch, device: torch.device) -> Tensor | None:
        if "gt_reward_scale" not in LOSSES[self.config.preference_loss].reads:
            return None
        given = sequence_values(batch, "given_rewards", device)
        return self.config.gt_reward_scale * (given[0::2] - given[1::2])

    def _sft(self, nll: Tensor, lengths: Tensor, batch: TokenBatch, num_pairs: float) -> Tensor:
        if self.config.sft_token_level_loss:
            num_tokens = sequence_values(batch, "num_class_tokens", nll.device)
            return (nll[0::2] / num_tokens[0::2].clamp(min=1)).sum()
        if self.config.sft_average_log_probs:
            nll = nll / lengths.clamp(min=1)
        return nll[0::2].sum() / num_pairs
