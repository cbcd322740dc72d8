"""Direct preference optimisation (arXiv:2305.18290): the only DPO step in posttrain, for any number of machines.

The reference is the policy at the start of the run: a frozen copy, or, with LoRA, the model under the adapters. At step 1
the two are equal and the preference loss is ln 2. Deviation: the two answers of a pair share their prompt's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.algorithms.clock import StageClock
from posttrain.algorithms.supervised_batches import num_sequence_tokens, pair_batch
from posttrain.policy.objectives import PreferenceLoss
from posttrain.roles import Policy
from posttrain.types import Pair, StepReport, TokenBatch


class PairStream(Protocol):
    def take(self, count: int) -> Sequence[Pair]: ...


@dataclass(frozen=True)
class Dpo:
    num_pairs_per_step: int
    objective: PreferenceLoss
    policy: Policy
    pairs: PairStream
    validation: Sequence[Pair] = ()

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = pair_batch(self.pairs.take(self.num_pairs_per_step))
        with clock("policy_and_reference_logprobs"):
            batch = self._with_reference(batch)
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        return StepReport(
            metrics={**update.metrics, "num_valid_samples": batch.num_sequences / 2},
            timings_s=clock.finish(),
            num_tokens=num_sequence_tokens(batch),
            num_samples=len(batch.responses),
        )

    def validate(self, step: int) -> StepReport | None:
        """The loss and the share of pairs ranked rightly, each pair counting the same."""
        if not self.validation:
            return None
        clock = StageClock()
        batch = self._with_reference(pair_batch(self.validation))
        metrics = self.policy.evaluate(batch, self.objective).metrics
        return StepReport(
            metrics=metrics,
            timings_s=clock.finish("total_validation_time"),
            num_tokens=num_sequence_tokens(batch),
            num_samples=len(batch.responses),
        )

    def _with_reference(self, batch: TokenBatch) -> TokenBatch:
        return batch.with_columns(reference_logprobs=self.policy.reference_logprobs(batch))
