"""Kahneman-Tversky optimisation (arXiv:2402.01306): answers labelled good or bad, no pairs.

The reward of an answer is the sum over its tokens of log p - log p_reference. Its loss compares it with the baseline z,
an estimate of KL(policy || reference) that is the same for the whole optimizer batch and carries no gradient:

    desirable      w_d (1 - s(beta (reward - z)))          mean over all answers of the batch
    undesirable    w_u (1 - s(beta (z - reward)))

z is a statistic of the whole batch, so it is not computed here: it comes in a column, as do the numbers of answers and
tokens of each class. Then micro-batches, packing and ranks change nothing.

Columns used: mask, reference_logprobs, desirable, kl_baseline, num_class_sequences, num_class_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.config import DpoConfig
from posttrain.policy.objectives.reduce import per_sequence, ranked, sequence_ids, sequence_values
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class KtoLoss:
    config: DpoConfig

    keeps_groups_whole = False

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        device = logprobs.device
        mask = batch.columns["mask"].to(device)
        reference = batch.columns["reference_logprobs"].to(device)
        ids, count = sequence_ids(batch, device), len(batch.responses)
        lengths = per_sequence(mask, ids, count)
        counts = (lengths > 0).float()  # fully masked answers are excluded
        is_good = sequence_values(batch, "desirable", device) > 0
        class_size = sequence_values(batch, "num_class_sequences", device).clamp(min=1)

        rewards = per_sequence((logprobs - reference) * mask, ids, count)
        lead = rewards - sequence_values(batch, "kl_baseline", device)
        lead = torch.where(is_good, lead, -lead)  # above 0: on the right side of the baseline
        weights = torch.where(is_good, self.config.desirable_weight, self.config.undesirable_weight)
        losses = weights * (1 - (self.config.reference_policy_kl_penalty * lead).sigmoid())
        preference = (losses * counts).sum() / max(batch.num_sequences, 1.0)
        loss = self.config.preference_loss_weight * preference
        sft = torch.zeros((), device=device)
        if self.config.sft_loss_weight > 0:
            nll = -per_sequence(logprobs * mask, ids, count)
            denominators = class_size * lengths.clamp(min=1) if self.config.sft_average_log_probs else class_size
            if self.config.sft_token_level_loss:
                denominators = sequence_values(batch, "num_class_tokens", device).clamp(min=1)
            sft = (nll * is_good / denominators).sum()
            loss = loss + self.config.sft_loss_weight * sft
        is_right, is_tie = ranked(lead, per_sequence(logprobs * mask, ids, count))
        metrics = {
            "loss": loss,
            "preference_loss": preference,
            "sft_loss": sft,
            "num_ranked_right": (is_right * counts).sum(),
            "num_ties": (is_tie * counts).sum(),
            "rewards_chosen_mean": (rewards * is_good / class_size).sum(),
            "rewards_rejected_mean": (rewards * ~is_good / class_size).sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
