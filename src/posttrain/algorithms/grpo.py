"""Group relative policy optimisation (arXiv:2402.03300): the only GRPO step in posttrain, for any number of machines.

Per step: sample a group of completions for each prompt, score them, credit each one against its own group, and make one
or more clipped policy-gradient updates.

Deviations from the paper, all as in NeMo RL: a leave-one-out baseline by default; the loss is a mean over all tokens of
the optimizer batch by default; the KL term is in the loss, not in the reward. And one of our own: a rollout whose scoring
failed is left out of the group's statistics and of the loss, instead of counting as a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.algorithms.advantages import GroupAdvantages
from posttrain.algorithms.clock import StageClock
from posttrain.algorithms.rollout_metrics import rollout_metrics, rollout_warnings
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.roles import Policy, RolloutSource
from posttrain.types import Group, StepReport, TokenBatch, UpdateReport


@dataclass(frozen=True)
class GrpoSettings:
    num_prompts_per_step: int
    num_generations_per_prompt: int
    num_updates_per_step: int = 1
    overlong_filtering: bool = False
    num_validation_prompts: int = 0


@dataclass(frozen=True)
class Grpo:
    settings: GrpoSettings
    objective: ClippedPolicyGradient
    advantages: GroupAdvantages
    policy: Policy
    rollouts: RolloutSource
    validation: RolloutSource | None = None

    def step(self, step: int) -> StepReport:
        clock = StageClock()

        with clock("generation"):
            tasks, completions = self.rollouts.sample(self.settings.num_prompts_per_step, step)

        with clock("reward_calculation"):
            groups = self.rollouts.score(tasks, completions)

        # Credit each completion against its own group. A group whose rewards are all equal teaches nothing.
        with clock("advantage_calculation"):
            groups = [group.with_advantages(self.advantages(group.rewards)) for group in groups]
            batches = self._minibatches(groups)

        # The frozen reference is scored once, and only when KL has a price. The policy before the first update is scored
        # only when there is a second one: otherwise the update's own forward pass gives the same numbers.
        with clock("policy_and_reference_logprobs"):
            if len(batches) > 1:
                batches = [b.with_columns(prev_logprobs=self.policy.logprobs(b)) for b in batches]
            if self.objective.needs_reference:
                batches = [b.with_columns(reference_logprobs=self.policy.reference_logprobs(b)) for b in batches]

        with clock("policy_training"):
            updates = [self.policy.update(batch, self.objective) for batch in batches]
            self.policy.end_step()

        num_updates = len(updates)
        metrics = {
            **_mean_over_updates(updates),
            **rollout_metrics(groups),
            "num_updates": float(num_updates),
        }
        return _report(groups, metrics, clock.finish(), rollout_warnings(groups, step))

    def validate(self, step: int) -> StepReport | None:
        """Mean reward on held-out prompts, with the weights as they are."""
        if self.validation is None or self.settings.num_validation_prompts == 0:
            return None
        clock = StageClock()
        tasks, completions = self.validation.sample(self.settings.num_validation_prompts, step)
        groups = self.validation.score(tasks, completions)
        metrics = rollout_metrics(groups)
        if "reward" in metrics:
            metrics["accuracy"] = metrics["reward"]
        if len(groups[0].rollouts) > 1:
            passed = [any((reward or 0) > 0 for reward in group.rewards) for group in groups]
            metrics[f"pass_{len(groups[0].rollouts)}"] = sum(passed) / len(groups)
        return _report(groups, metrics, clock.finish("total_validation_time"), ())

    def _minibatches(self, groups: Sequence[Group]) -> list[TokenBatch]:
        """The rollouts in their order, cut into one batch per optimizer update. Unscored ones are not trained on."""
        per_update = self.settings.num_prompts_per_step * self.settings.num_generations_per_prompt
        per_update //= self.settings.num_updates_per_step
        places = [(g, r) for g, group in enumerate(groups) for r in range(len(group.rollouts))]
        batches = []
        for start in range(0, len(places), per_update):
            chosen = [
                (groups[g], g, r) for g, r in places[start : start + per_update] if groups[g].rollouts[r].score.scored
            ]
            if chosen:
                batches.append(self._batch(chosen))
        return batches

    def _batch(self, chosen: Sequence[tuple[Group, int, int]]) -> TokenBatch:
        prompts: dict[int, Sequence[int]] = {g: group.task.prompt_ids for group, g, _ in chosen}
        place = {g: index for index, g in enumerate(prompts)}
        rollouts = [group.rollouts[r] for group, _, r in chosen]
        lengths = torch.tensor([len(rollout.completion.token_ids) for rollout in rollouts])
        mask = [
            float(trained and not (self.settings.overlong_filtering and rollout.truncated))
            for rollout in rollouts
            for trained in rollout.completion.trained
        ]
        return TokenBatch.build(
            prompts=list(prompts.values()),
            responses=[rollout.completion.token_ids for rollout in rollouts],
            prompt_of=[place[g] for _, g, _ in chosen],
            columns={
                "mask": torch.tensor(mask, dtype=torch.float32),
                "advantages": torch.tensor([r.advantage for r in rollouts], dtype=torch.float32).repeat_interleave(
                    lengths
                ),
                "generation_logprobs": torch.tensor(
                    [logprob for rollout in rollouts for logprob in rollout.completion.logprobs], dtype=torch.float32
                ),
            },
        )


def _mean_over_updates(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """Each metric's mean over the updates of the step; extremes stay extremes."""
    names = {name: None for update in updates for name in update.metrics}
    means = {}
    for name in names:
        values = [update.metrics[name] for update in updates if name in update.metrics]
        if name.endswith("_min"):
            means[name] = min(values)
        elif name.endswith("_max"):
            means[name] = max(values)
        else:
            means[name] = math.fsum(values) / len(values)
    return means


def _report(
    groups: Sequence[Group], metrics: dict[str, float], timings_s: dict[str, float], warnings: Sequence[str]
) -> StepReport:
    samples = [(group, rollout) for group in groups for rollout in group.rollouts]
    return StepReport(
        metrics=metrics,
        timings_s=timings_s,
        groups=tuple(groups),
        num_tokens=sum(len(group.task.prompt_ids) + len(rollout.completion.token_ids) for group, rollout in samples),
        num_samples=len(samples),
        warnings=tuple(warnings),
    )
