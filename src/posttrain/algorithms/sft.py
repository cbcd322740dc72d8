"""Supervised fine-tuning on given answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.algorithms.batches import RowStream, example_batch
from posttrain.algorithms.step_reports import StageClock, batch_report
from posttrain.policy.objectives import NegativeLogLikelihood
from posttrain.roles import Trainer
from posttrain.types import Example, StepReport


@dataclass(frozen=True)
class Sft:
    num_examples_per_step: int
    policy: Trainer
    examples: RowStream[Example]
    validation: Sequence[Example] = ()
    objective: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = example_batch(self.examples.take(self.num_examples_per_step))
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        return batch_report(batch, {**update.metrics, "num_valid_tokens": batch.num_tokens}, clock.finish())

    def validate(self, step: int) -> StepReport | None:
        if not self.validation:
            return None
        clock = StageClock()
        batch = example_batch(self.validation)
        metrics = self.policy.evaluate(batch, self.objective).metrics
        return batch_report(batch, metrics, clock.finish("total_validation_time"))
