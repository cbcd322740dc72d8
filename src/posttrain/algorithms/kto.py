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

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from posttrain.algorithms.answers import AnswerTraining
from posttrain.algorithms.batches import judged_batch, mismatched_batch
from posttrain.algorithms.dpo import Reference
from posttrain.algorithms.step_reports import StageClock, with_accuracy
from posttrain.types import Judged, TokenBatch


@dataclass(frozen=True)
class Kto(AnswerTraining[Judged]):
    reference: Reference = field(kw_only=True)
    max_total_tokens: int = field(kw_only=True)  # limit for a prompt with another prompt's answer

    make_batch = staticmethod(judged_batch)

    def _prepared(
        self, batch: TokenBatch, step: int, clock: StageClock, *, validates: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        with clock("policy_and_reference_logprobs"):
            logprobs, known = self.reference.logprobs(batch, step)
            # Mismatched pairs of a step are not cached: in the next epoch the answer gets another prompt.
            kl = self._baseline(batch, step, keep=validates)
        columns = {"reference_logprobs": logprobs, "kl_baseline": torch.full_like(batch.columns["mask"], kl)}
        return batch.with_columns(**columns), {"kl": kl, "reference_cached": known}

    def _baseline(self, batch: TokenBatch, step: int, *, keep: bool) -> float:
        mismatched = mismatched_batch(batch, self.max_total_tokens)
        reference, _ = self.reference.logprobs(mismatched, step, keep=keep)
        differences = (self.policy.logprobs(mismatched) - reference).double()
        return max(0.0, float(differences.sum()) / len(mismatched.responses))

    def _summary(self, metrics: Mapping[str, float], batch: TokenBatch) -> dict[str, float]:
        """With the margin. If the batch lacks a class, its mean reward and the margin are left out, not 0."""
        found = with_accuracy(metrics, batch.num_sequences)
        present = {"rewards_chosen_mean": 1.0, "rewards_rejected_mean": 0.0}
        missing = [name for name, verdict in present.items() if not (batch.columns["desirable"] == verdict).any()]
        if not missing:
            return {**found, "rewards_margin_mean": found["rewards_chosen_mean"] - found["rewards_rejected_mean"]}
        return {name: value for name, value in found.items() if name not in missing}
