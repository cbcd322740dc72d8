"""Training on the answers of the data: what preference losses, reward models and supervised fine-tuning share.

`dpo.py` and `kto.py` add a reference. Deviation from the papers: the answers to one prompt share its computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from posttrain.algorithms.batches import RowStream, example_batch, pair_batch
from posttrain.algorithms.step_reports import StageClock, batch_report
from posttrain.roles import Objective, Trainer
from posttrain.types import Example, Pair, StepReport, TokenBatch

Row = TypeVar("Row")


@dataclass(frozen=True)
class AnswerTraining(Generic[Row]):
    """`roles.Algorithm` over rows of data, each with one answer or two."""

    num_rows_per_step: int
    objective: Objective
    policy: Trainer
    rows: RowStream[Row]
    validation: Sequence[Row] = ()

    make_batch: ClassVar[Callable[..., TokenBatch]]  # of rows
    answers_per_row: ClassVar[int] = 1

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = self.make_batch(self.rows.take(self.num_rows_per_step))
        batch, measured = self._prepared(batch, step, clock, validates=False)
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        return batch_report(batch, {**self._summary(update.metrics, batch), **measured}, clock.finish())

    def validate(self, step: int) -> StepReport | None:
        """The same metrics of held-out rows; every row has equal weight."""
        if not self.validation:
            return None
        clock = StageClock()
        batch, measured = self._prepared(self.make_batch(self.validation), step, clock, validates=True)
        metrics = {**self._summary(self.policy.evaluate(batch, self.objective).metrics, batch), **measured}
        timings_s = clock.finish("total_validation_time")
        return batch_report(batch, metrics, timings_s, answers_per_sample=self.answers_per_row)

    def _prepared(
        self, batch: TokenBatch, step: int, clock: StageClock, *, validates: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        """The batch with further columns that the objective needs, and metrics of them."""
        return batch, {}

    def _summary(self, metrics: Mapping[str, float], batch: TokenBatch) -> dict[str, float]:
        """What is reported of the objective's metrics."""
        return dict(metrics)


class Sft(AnswerTraining[Example]):
    """Supervised fine-tuning on given answers."""

    make_batch = staticmethod(example_batch)

    def _prepared(
        self, batch: TokenBatch, step: int, clock: StageClock, *, validates: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        return batch, {} if validates else {"num_valid_tokens": batch.num_tokens}


class RewardModelTraining(AnswerTraining[Pair]):
    """A Bradley-Terry reward model: no reference, no sampling; one forward pass per pair, whose scores are compared."""

    make_batch, answers_per_row = staticmethod(pair_batch), 2

    def _summary(self, metrics: Mapping[str, float], batch: TokenBatch) -> dict[str, float]:
        """With the accuracy, and the mean and standard deviation of all scores for normalisation."""
        rest, num_pairs = dict(metrics), batch.num_sequences / 2
        accuracy = rest.pop("num_ranked_right") / max(num_pairs, 1.0)  # divided once, so it cannot exceed 1
        square = rest.pop("rewards_square_mean")
        mean = (rest["rewards_chosen_mean"] + rest["rewards_rejected_mean"]) / 2
        deviation = math.sqrt(max(square - mean**2, 0.0))
        added = {"accuracy": accuracy, "rewards_mean": mean, "rewards_std": deviation, "num_valid_samples": num_pairs}
        return {**rest, **added}
