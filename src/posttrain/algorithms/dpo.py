"""Preference optimisation on pairs (DPO, arXiv:2305.18290, and variants): the only preference step in posttrain, for
any number of machines. The loss selects the objective.

The reference is the policy at the start of the run: a frozen copy, or, with LoRA, the base model without adapters. At
step 1 policy and reference are equal, so the DPO loss is ln 2. Reference-free losses (simpo, orpo) load no reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from posttrain.algorithms.answers import AnswerTraining
from posttrain.algorithms.batches import RowStream, pair_batch
from posttrain.algorithms.step_reports import StageClock, with_accuracy
from posttrain.types import Pair, TokenBatch

PairStream = RowStream[Pair]


class Reference(Protocol):
    """Log-probabilities under the frozen reference, cached per answer if memory allows."""

    def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
        """One value per response token, and the fraction of tokens served from the cache."""


@dataclass(frozen=True)
class Dpo(AnswerTraining[Pair]):
    reference: Reference | None = None  # None: reference-free loss

    make_batch, answers_per_row = staticmethod(pair_batch), 2

    def _prepared(
        self, batch: TokenBatch, step: int, clock: StageClock, *, validates: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        if self.reference is None:
            return batch, {}
        with clock("policy_and_reference_logprobs"):
            logprobs, known = self.reference.logprobs(batch, step)
        return batch.with_columns(reference_logprobs=logprobs), {"reference_cached": known}

    def _summary(self, metrics: Mapping[str, float], batch: TokenBatch) -> dict[str, float]:
        return with_accuracy(metrics, batch.num_sequences / 2)
