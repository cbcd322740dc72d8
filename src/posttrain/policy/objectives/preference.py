"""Direct preference optimisation (arXiv:2305.18290), with the options and metric names of NeMo RL.

Responses come in pairs, chosen then rejected, of one prompt. The reward of a response is the sum (or, with
`preference_average_log_probs`, the mean) over its tokens of log p - log p_reference; it is *not* multiplied by beta in the
metrics. With equal policy and reference the preference loss is ln 2.

Columns used: mask, reference_logprobs. `TokenBatch.num_sequences` counts both responses of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.policy.objectives.reduce import per_sequence, sequence_ids
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class PreferenceLoss:
    reference_policy_kl_penalty: float = 0.05
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0

    keeps_groups_whole = True

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        num_pairs = max(batch.num_sequences / 2, 1.0)
        mask = batch.columns["mask"].to(logprobs.device)
        reference = batch.columns["reference_logprobs"].to(logprobs.device)
        ids, count = sequence_ids(batch, logprobs.device), len(batch.responses)
        lengths = per_sequence(mask, ids, count)

        rewards = per_sequence((logprobs - reference) * mask, ids, count)
        if self.preference_average_log_probs:
            rewards = rewards / lengths.clamp(min=1)
        chosen, rejected = rewards[0::2], rewards[1::2]
        counts = (lengths[0::2] > 0).float()  # a pair that is masked altogether takes no part
        margins = chosen - rejected
        preference = -(F.logsigmoid(self.reference_policy_kl_penalty * margins) * counts).sum() / num_pairs
        loss = self.preference_loss_weight * preference

        sft = torch.zeros((), device=logprobs.device)
        if self.sft_loss_weight > 0:
            nll = -per_sequence(logprobs * mask, ids, count)
            if self.sft_average_log_probs:
                nll = nll / lengths.clamp(min=1)
            sft = nll[0::2].sum() / num_pairs
            loss = loss + self.sft_loss_weight * sft
        metrics = {
            "loss": loss,
            "preference_loss": preference,
            "sft_loss": sft,
            "accuracy": (chosen > rejected).float().sum() / num_pairs,
            "rewards_chosen_mean": chosen.sum() / num_pairs,
            "rewards_rejected_mean": rejected.sum() / num_pairs,
            "rewards_margin_mean": margins.sum() / num_pairs,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
