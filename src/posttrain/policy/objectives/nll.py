"""Supervised fine-tuning: the mean negative log-likelihood over all trained tokens of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from posttrain.types import TokenBatch


@dataclass(frozen=True)
class NegativeLogLikelihood:
    keeps_groups_whole = False

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        mask = batch.columns["mask"].to(logprobs.device)
        loss = -(logprobs * mask).sum() / max(batch.num_tokens, 1.0)
        return loss, {"loss": loss.detach()}
