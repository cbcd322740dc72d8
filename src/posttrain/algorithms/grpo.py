"""Group relative policy optimisation (arXiv:2402.03300): the only GRPO step in posttrain, for any number of machines.

Per step: sample a group of completions for each prompt, score them, compute advantages within each group, and make one
or more clipped policy-gradient updates.

Deviations from the paper, all as in NeMo RL: a leave-one-out baseline by default; the loss is a mean over all tokens of
the optimizer batch by default; the KL term is in the loss, not in the reward. One deviation of our own: a rollout whose
scoring failed is excluded from the group statistics and the loss, instead of counting as reward 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.algorithms.batches import (
    minibatches,
    of_tokens,
    rollout_batch,
    scored_places,
    with_anchor,
    with_reference_as_behavior,
    without_logprob_errors,
)
from posttrain.algorithms.credit import Credit
from posttrain.algorithms.pass_at_k import ANY_POSITIVE_REWARD, reward_metrics
from posttrain.algorithms.step_reports import (
    StageClock,
    TokenSampling,
    num_sequence_tokens,
    rollout_metrics,
    rollout_warnings,
    token_traces,
)
from posttrain.data.reward_values import total
from posttrain.policy.objectives import ClippedPolicyGradient, Distillation
from posttrain.policy.objectives.kl import kl_estimate
from posttrain.roles import RolloutSource, Trainer, WeightSync
from posttrain.types import Group, StepReport, TokenBatch, TokenTrace, UpdateReport


@dataclass(frozen=True)
class GrpoSettings:
    num_prompts_per_step: int
    num_updates_per_step: int = 1
    overlong_filtering: bool = False
    seq_logprob_error_threshold: float | None = None
    num_validation_prompts: int = 0
    tokens: TokenSampling | None = None
    kl_period: int = 0  # steps between estimates of the KL to the reference if it is not in the loss; 0: off


@dataclass(frozen=True)
class Grpo:
    settings: GrpoSettings
    objective: ClippedPolicyGradient
    credit: Credit
    policy: Trainer
    rollouts: RolloutSource
    weights: WeightSync
    validation: RolloutSource | None = None
    announce: Callable[[str], None] = lambda stage: None

    def step(self, step: int) -> StepReport:
        clock = StageClock()

        # Scored groups of completions, one group per prompt: fresh, recorded, multi-turn or filtered.
        taken = self.rollouts.take(self.settings.num_prompts_per_step, step)
        clock.add(taken.timings_s)

        # Log-probabilities of all rows that advantages and the loss need in addition to the update's forward pass. None
        # are needed without a KL penalty, recorded answers and `seq_logprob_error_threshold`.
        self.announce("Preparing for logprob inference")
        with clock("logprob_inference_prep"):
            batch = rollout_batch(taken.groups, overlong_filtering=self.settings.overlong_filtering)
            is_fresh = ~of_tokens(_off_policy_rows(taken.groups, step), batch)
        with clock("policy_and_reference_logprobs"):
            batch, facts = self._with_logprobs(batch, taken.groups, is_fresh)
            facts |= self._kl_to_start(batch, is_fresh, step)

        # Compute advantages within each group. A group whose rewards are all equal gives no gradient: unless the loss
        # has another term, its rows are left out from here on.
        self.announce("Computing advantages")
        with clock("advantage_calculation"):
            groups, batch, credit_facts = self.credit(taken.groups, batch, scored_places(taken.groups))
        self.announce("Preparing for training")
        with clock("training_prep"):
            batches = self._minibatches(batch, groups, step)

        # With several updates, ratios are taken against the policy before the first.
        with clock("policy_and_reference_logprobs"):
            batches = [self._anchored(batch) for batch in batches]

        traces: tuple[TokenTrace, ...] = ()
        sampled = self.settings.tokens
        if sampled is not None and sampled.is_due(step):
            with clock("token_data"):
                traces = token_traces(groups, batch, sampled.num_groups, self.policy.logprobs)

        with clock("policy_training"):
            updates = [self.policy.update(batch, self.objective) for batch in batches]
            self.policy.end_step()
        with clock("prepare_for_generation/transfer_and_update_weights"):
            self.weights.publish(step)

        num_with_gradient = sum(len(batch.responses) for batch in batches)
        metrics = {
            **_mean_over_updates(updates),
            **facts,
            **credit_facts,
            **({"samples_with_gradient": num_with_gradient / len(batch.responses)} if batch.responses else {}),
            **rollout_metrics(taken.sampled or groups),
            **taken.metrics,
            "num_updates": float(len(updates)),
        }
        report = _report(
            groups,
            metrics,
            clock.finish(),
            rollout_warnings(
                groups, step, compares=not isinstance(self.objective, Distillation) and self.credit.compares
            ),
        )
        return replace(report, tokens=traces, num_trained_tokens=sum(num_sequence_tokens(batch) for batch in batches))

    def validate(self, step: int) -> StepReport | None:
        """Mean reward on held-out prompts, with the current weights."""
        if self.validation is None or self.settings.num_validation_prompts == 0:
            return None
        clock = StageClock()
        groups = self.validation.take(self.settings.num_validation_prompts, step).groups
        metrics = rollout_metrics(groups)
        # Same metrics as `posttrain eval`, with NeMo RL's names. Here any reward above 0 passes.
        found = reward_metrics([group.rewards for group in groups], pass_threshold=ANY_POSITIVE_REWARD)
        names = {f"avg@{len(groups[0].rollouts)}": "accuracy"}
        metrics |= {names.get(name, name.replace("@", "_")): value for name, value in found.items()}
        return _report(groups, metrics, clock.finish("total_validation_time"), ())

    def _with_logprobs(
        self, batch: TokenBatch, groups: Sequence[Group], is_fresh: Tensor
    ) -> tuple[TokenBatch, dict[str, float]]:
        """The log-probability columns that all rows need: of the reference and of the current policy."""
        if not batch.responses:
            return batch, {}
        settings = self.settings
        is_recorded = of_tokens(_recorded_rows(groups), batch)
        if self.objective.needs_reference or self.credit.kl is not None or bool(is_recorded.any()):
            batch = batch.with_columns(reference_logprobs=self.policy.reference_logprobs(batch))
            batch = with_reference_as_behavior(batch, is_recorded)
        if self.credit.kl is not None or settings.seq_logprob_error_threshold is not None:
            batch = batch.with_columns(current_logprobs=self.policy.logprobs(batch))
        if settings.seq_logprob_error_threshold is None:
            return batch, {}
        return without_logprob_errors(batch, settings.seq_logprob_error_threshold, is_fresh)

    def _kl_to_start(self, batch: TokenBatch, is_fresh: Tensor, step: int) -> dict[str, float]:
        """Every few steps, the KL between sampling policy and reference, as a metric only."""
        period = self.settings.kl_period
        if period == 0 or step % period or not batch.responses:
            return {}
        weights = batch.columns["mask"] * is_fresh
        if not bool(weights.any()):
            return {}
        log_ratio = self.policy.reference_logprobs(batch) - batch.columns["generation_logprobs"]
        kl = torch.where(weights != 0, kl_estimate(log_ratio, "k3"), 0.0)
        return {"kl_to_start": float((kl * weights).sum() / weights.sum())}

    def _minibatches(self, batch: TokenBatch, groups: Sequence[Group], step: int) -> list[TokenBatch]:
        """Off-policy rows are anchored at their sampler: their ratio is clipped; with importance sampling correction,
        recorded rows only."""
        if not batch.responses:
            return []
        is_corrected = self.objective.config.use_importance_sampling_correction
        at_sampler = _recorded_rows(groups) if is_corrected else _off_policy_rows(groups, step)
        batches = minibatches(
            batch.with_columns(at_sampler=of_tokens(at_sampler, batch)),
            groups,
            self.settings.num_updates_per_step,
            with_rewarded=self.objective.config.positive_example_nll_weight != 0,
        )
        return [self.objective.with_gradient(batch) for batch in batches]

    def _anchored(self, batch: TokenBatch) -> TokenBatch:
        several_updates = self.settings.num_updates_per_step > 1
        is_known = "current_logprobs" in batch.columns or bool(batch.columns["at_sampler"].all())
        if several_updates and not is_known:
            batch = batch.with_columns(current_logprobs=self.policy.logprobs(batch))
        return with_anchor(batch, several_updates=several_updates)


def _recorded_rows(groups: Sequence[Group]) -> list[bool]:
    """Which rows are recorded answers: their behaviour policy is unknown."""
    return [not groups[g].rollouts[r].completion.logprobs for g, r in scored_places(groups)]


def _off_policy_rows(groups: Sequence[Group], step: int) -> list[bool]:
    """Which rows hold tokens that the weights of this step did not sample. Step 1 starts from version 0."""
    completions = [groups[g].rollouts[r].completion for g, r in scored_places(groups)]
    return [
        not completion.logprobs or any(version != step - 1 for _, version in completion.versions)
        for completion in completions
    ]


def _mean_over_updates(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """Each metric's mean over the updates of the step that have it; minima and maxima are kept."""
    names = {name: None for update in updates for name in update.metrics}
    means = {}
    for name in names:
        values = [update.metrics[name] for update in updates if name in update.metrics]
        if name.endswith("_min"):
            means[name] = min(values)
        elif name.endswith("_max"):
            means[name] = max(values)
        else:
            means[name] = total(values) / len(values)
    if 0 < (square := means.pop("sampling_importance_square", 0.0)) < math.inf:
        means["sampling_effective_sample_size"] = means["sampling_importance_ratio"] ** 2 / square
    return means


def _report(
    groups: Sequence[Group], metrics: dict[str, float], timings_s: dict[str, float], warnings: Sequence[str]
) -> StepReport:
    samples = [(group, rollout) for group in groups for rollout in group.rollouts]
    return StepReport(
        metrics=metrics,
        timings_s=timings_s,
        groups=tuple(groups),
        num_tokens=sum(
            len(row.prompt_ids or group.task.prompt_ids) + len(row.token_ids)
            for group, rollout in samples
            for row in rollout.completion.rows
        ),
        num_samples=len(samples),
        warnings=tuple(warnings),
    )
