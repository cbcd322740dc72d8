"""The losses of supervised fine-tuning and of reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from posttrain.policy.objectives.reduce import masked_extreme, per_sequence, sequence_ids
from posttrain.types import TokenBatch


@dataclass(frozen=True)
class BradleyTerry:
    """The loss of a reward model: how likely the better of two answers is to win (Bradley-Terry; arXiv:1706.03741).

        loss = -log sigmoid(score(chosen) - score(rejected) - margin)  +  c * (score(chosen) + score(rejected))^2

    Only differences of scores are learnt from the first term; the second, off by default, keeps the scores around 0
    (arXiv:2312.09244). The margin, off by default, requires a larger difference where the answers differ more (Llama 2,
    arXiv:2307.09288). As in TRL's RewardTrainer; NeMo RL has the first term alone.

    Responses come in pairs, chosen then rejected, of one prompt. Scores take the place of log-probabilities: the score
    of a response at its last token, 0 elsewhere. Columns used: mask; for margins given_rewards. Correctly ranked pairs
    are reported as a count, which adds up exactly; ties are not included.
    """

    center_rewards_coefficient: float = 0.0
    margin_from_rewards: bool = False  # require the difference of the annotated rewards

    keeps_groups_whole = True

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        num_pairs = max(batch.num_sequences / 2, 1.0)
        ids, count = sequence_ids(batch, logprobs.device), len(batch.responses)
        # Fully masked pairs are excluded.
        counts = (per_sequence(batch.columns["mask"].to(logprobs.device), ids, count)[0::2] > 0).float()
        scores = per_sequence(logprobs, ids, count)
        chosen, rejected = scores[0::2], scores[1::2]

        margins = chosen - rejected
        wanted = margins
        if self.margin_from_rewards:
            given = margins.new_tensor([float(part[0]) for part in batch.column_parts("given_rewards")])
            wanted = margins - (given[0::2] - given[1::2])
        preference = -(F.logsigmoid(wanted) * counts).sum() / num_pairs
        loss = preference
        if self.center_rewards_coefficient:
            loss = loss + self.center_rewards_coefficient * ((chosen + rejected).square() * counts).sum() / num_pairs
        both = counts.repeat_interleave(2)
        metrics = {
            "loss": loss,
            "preference_loss": preference,
            "num_ranked_right": ((chosen > rejected) * counts).sum(),
            "rewards_chosen_mean": (chosen * counts).sum() / num_pairs,
            "rewards_rejected_mean": (rejected * counts).sum() / num_pairs,
            "rewards_margin_mean": (margins * counts).sum() / num_pairs,
            "rewards_square_mean": (scores.square() * both).sum() / (2 * num_pairs),
            "rewards_min": masked_extreme(scores, both, largest=False),
            "rewards_max": masked_extreme(scores, both, largest=True),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: the mean negative log-likelihood over all trained tokens of the batch."""

    keeps_groups_whole = False

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        mask = batch.columns["mask"].to(logprobs.device)
        loss = -(logprobs * mask).sum() / max(batch.num_tokens, 1.0)
        return loss, {"loss": loss.detach()}
