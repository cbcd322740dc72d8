"""Training of a Bradley-Terry reward model from preference pairs: the only such step, for any number of machines.

No reference, no sampling: one forward pass per pair, and a comparison of the two scores. Deviation
from the papers: the two answers of a pair share their prompt's computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.algorithms.batches import RowStream, pair_batch
from posttrain.algorithms.step_reports import StageClock, batch_report
from posttrain.policy.objectives import BradleyTerry
from posttrain.roles import Trainer
from posttrain.types import Pair, StepReport


@dataclass(frozen=True)
class RewardModelTraining:
    num_pairs_per_step: int
    objective: BradleyTerry
    policy: Trainer
    pairs: RowStream[Pair]
    validation: Sequence[Pair] = ()

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = pair_batch(self.pairs.take(self.num_pairs_per_step))
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        num_pairs = batch.num_sequences / 2
        return batch_report(
            batch,
            _summary(update.metrics, num_pairs),
            clock.finish(),
        )

    def validate(self, step: int) -> StepReport | None:
        """Loss and ranking accuracy; every pair has equal weight."""
        if not self.validation:
            return None
        clock = StageClock()
        batch = pair_batch(self.validation)
        return batch_report(
            batch,
            _summary(self.policy.evaluate(batch, self.objective).metrics, batch.num_sequences / 2),
            clock.finish("total_validation_time"),
            answers_per_sample=2,
        )


def _summary(metrics: Mapping[str, float], num_pairs: float) -> dict[str, float]:
    """Adds the accuracy, and the mean and standard deviation of all scores for normalisation."""
    rest = dict(metrics)
    accuracy = rest.pop("num_ranked_right") / max(num_pairs, 1.0)  # divided once, so it cannot exceed 1
    square = rest.pop("rewards_square_mean")
    mean = (rest["rewards_chosen_mean"] + rest["rewards_rejected_mean"]) / 2
    deviation = math.sqrt(max(square - mean**2, 0.0))
    added = {"accuracy": accuracy, "rewards_mean": mean, "rewards_std": deviation, "num_valid_samples": num_pairs}
    return {**rest, **added}
