"""Kahneman-Tversky optimisation (arXiv:2402.01306): learns from single answers, each labelled good or bad.

Answers are compared with a baseline, an estimate of KL(policy || reference): the mean over the batch of log p - log
p_reference of answers to *other* prompts, clamped at 0. Each prompt is paired with the answer to the prompt before it,
as in TRL. The baseline is computed before the update, with the weights that the update starts from, and carries no
gradient.

Deviations from TRL: the batch is the whole optimizer batch, not the part that one device holds at a time, so that
neither micro-batches nor ranks change the loss; and where a batch has several answers to one prompt, the shift is the
one that leaves the fewest with their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.algorithms.batches import RowStream, judged_batch, mismatched_batch
from posttrain.algorithms.dpo import Reference
from posttrain.algorithms.step_reports import StageClock, batch_report, with_accuracy
from posttrain.policy.objectives import KtoLoss
from posttrain.roles import Trainer
from posttrain.types import Judged, StepReport, TokenBatch


@dataclass(frozen=True)
class Kto:
    num_answers_per_step: int
    max_total_tokens: int  # limit for a prompt with another prompt's answer
    objective: KtoLoss
    policy: Trainer
    answers: RowStream[Judged]
    reference: Reference
    validation: Sequence[Judged] = ()

    def step(self, step: int) -> StepReport:
        clock = StageClock()
        with clock("data_processing"):
            batch = judged_batch(self.answers.take(self.num_answers_per_step))
        # Mismatched pairs are not cached: in the next epoch the answer gets another prompt.
        batch, measured = self._with_reference(batch, step, clock, keep_mismatches=False)
        with clock("policy_training"):
            update = self.policy.update(batch, self.objective)
            self.policy.end_step()
        return batch_report(
            batch,
            {**_with_margin(with_accuracy(update.metrics, batch.num_sequences), batch), **measured},
            clock.finish(),
        )

    def validate(self, step: int) -> StepReport | None:
        if not self.validation:
            return None
        clock = StageClock()
        batch, measured = self._with_reference(judged_batch(self.validation), step, clock, keep_mismatches=True)
        metrics = self.policy.evaluate(batch, self.objective).metrics
        return batch_report(
            batch,
            {**_with_margin(with_accuracy(metrics, batch.num_sequences), batch), **measured},
            clock.finish("total_validation_time"),
        )

    def _with_reference(
        self, batch: TokenBatch, step: int, clock: StageClock, *, keep_mismatches: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        with clock("policy_and_reference_logprobs"):
            logprobs, known = self.reference.logprobs(batch, step)
            kl = self._baseline(batch, step, keep_mismatches)
        columns = {"reference_logprobs": logprobs, "kl_baseline": torch.full_like(batch.columns["mask"], kl)}
        return batch.with_columns(**columns), {"kl": kl, "reference_cached": known}

    def _baseline(self, batch: TokenBatch, step: int, keep: bool) -> float:
        mismatched = mismatched_batch(batch, self.max_total_tokens)
        reference, _ = self.reference.logprobs(mismatched, step, keep=keep)
        differences = (self.policy.logprobs(mismatched) - reference).double()
        return max(0.0, float(differences.sum()) / len(mismatched.responses))


def _with_margin(metrics: dict[str, float], batch: TokenBatch) -> dict[str, float]:
    """If the batch lacks a class, its mean reward and the margin are omitted, not reported as 0."""
    present = {"rewards_chosen_mean": 1.0, "rewards_rejected_mean": 0.0}
    missing = [name for name, verdict in present.items() if not (batch.columns["desirable"] == verdict).any()]
    if not missing:
        margin = metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"]
        return {**metrics, "rewards_margin_mean": margin}
    return {name: value for name, value in metrics.items() if name not in missing}
