"""Preference optimisation on pairs (DPO, arXiv:2305.18290, and variants): the only preference step in posttrain, for
any number of machines. The loss selects the objective.

The reference is the policy at the start of the run: a frozen copy, or, with LoRA, the base model without adapters. At
step 1 policy and reference are equal, so the DPO loss is ln 2. Reference-free losses (simpo, orpo) load no reference.
Deviation: the two answers of a pair share the computation of their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from posttrain.algorithms.batches import RowStream, pair_batch
from posttrain.algorithms.step_reports import StageClock, batch_report, with_accuracy
from posttrain.policy.objectives import PreferenceLoss
from posttrain.roles import Trainer
from posttrain.types import Pair, StepReport, TokenBatch

PairStream = RowStream[Pair]


class Reference(Protocol):
    """Log-probabilities under the frozen reference, cached per answer if memory allows."""

    def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
        """One value per response token, and the fraction of tokens served from the cache."""
        ...


@dataclass(frozen=True)
class Dpo:
    num_pairs_per_step: int
    objective: PreferenceLoss
    policy: Trainer
    pairs: PairStream
    validation: Sequence[Pair] = ()
    reference: Reference | None = None  # None: reference-free loss

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = pair_batch(self.pairs.take(self.num_pairs_per_step))
        batch, measured = self._with_reference(batch, step, clock)
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        num_pairs = batch.num_sequences / 2
        return batch_report(
            batch,
            {**with_accuracy(update.metrics, num_pairs), **measured},
            clock.finish(),
        )

    def validate(self, step: int) -> StepReport | None:
        """Loss and ranking accuracy; every pair has equal weight."""
        if not self.validation:
            return None
        clock = StageClock()
        batch, measured = self._with_reference(pair_batch(self.validation), step, clock)
        metrics = self.policy.evaluate(batch, self.objective).metrics
        return batch_report(
            batch,
            {**with_accuracy(metrics, batch.num_sequences / 2), **measured},
            clock.finish("total_validation_time"),
            answers_per_sample=2,
        )

    def _with_reference(self, batch: TokenBatch, step: int, clock: StageClock) -> tuple[TokenBatch, dict[str, float]]:
        if self.reference is None:
            return batch, {}
        with clock("policy_and_reference_logprobs"):
            logprobs, known = self.reference.logprobs(batch, step)
        return batch.with_columns(reference_logprobs=logprobs), {"reference_cached": known}
