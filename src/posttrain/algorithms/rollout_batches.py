"""The batches that GRPO trains on: one row per scored rollout, cut into one batch per optimizer update.

A row has the log-probabilities of its behaviour policy, which sampled it. For recorded answers, whose behaviour policy
is unknown, the initial policy is used instead. Ratios are taken against `prev_logprobs`, the anchor: the policy before
the first update of the step for on-policy samples, the behaviour policy for all others. With importance sampling
correction, the anchor of answers that earlier weights sampled is the policy before the first update as well, and the
loss weighs them by the ratio of the two. `prev_is_current` marks rows anchored at the policy of the update itself,
which needs no separate forward pass if there is only one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.types import Group, TokenBatch

Place = tuple[int, int]  # (group, rollout)


def scored_places(groups: Sequence[Group]) -> list[Place]:
    """The rollouts that form the rows of a batch: all scored ones, in order."""
    return [
        (g, r) for g, group in enumerate(groups) for r, rollout in enumerate(group.rollouts) if rollout.score.scored
    ]


def rollout_batch(groups: Sequence[Group], *, overlong_filtering: bool = False) -> TokenBatch:
    """All scored rollouts of the step. Rollouts dropped by `overlong_filtering` are masked but still count for
    advantages.
    """
    places = scored_places(groups)
    prompts = {g: groups[g].task.prompt_ids for g, _ in places}
    index = {g: i for i, g in enumerate(prompts)}
    rollouts = [groups[g].rollouts[r] for g, r in places]
    mask = [
        float(trained and not (overlong_filtering and rollout.truncated))
        for rollout in rollouts
        for trained in rollout.completion.trained
    ]
    sampler = [
        logprob
        for rollout in rollouts
        for logprob in rollout.completion.logprobs or (0.0,) * len(rollout.completion.token_ids)
    ]
    return TokenBatch.build(
        prompts=list(prompts.values()),
        responses=[rollout.completion.token_ids for rollout in rollouts],
        prompt_of=[index[g] for g, _ in places],
        columns={
            "mask": torch.tensor(mask, dtype=torch.float32),
            "generation_logprobs": torch.tensor(sampler, dtype=torch.float32),
        },
    )


def of_tokens(rows: Sequence[bool], batch: TokenBatch) -> Tensor:
    """A flag of each row, repeated for its tokens."""
    lengths = torch.tensor(batch.response_lengths, dtype=torch.long)
    return torch.tensor(rows, dtype=torch.bool).repeat_interleave(lengths)


def with_reference_as_behavior(batch: TokenBatch, is_recorded: Tensor) -> TokenBatch:
    """Recorded answers use the log-probabilities of the initial policy, as their behaviour policy is unknown."""
    columns = batch.columns
    sampler = torch.where(is_recorded, columns["reference_logprobs"], columns["generation_logprobs"])
    return batch.with_columns(generation_logprobs=sampler)


def with_anchor(batch: TokenBatch, *, several_updates: bool) -> TokenBatch:
    """Adds `prev_logprobs` if an anchor other than the current policy is needed; drops `current_logprobs` and `at_sampler`.

    `at_sampler` marks tokens whose anchor is the policy that sampled them. Where `prev_is_current`
    is 1, the anchor is the current policy, and no forward pass is made for it beforehand.
    """
    columns = dict(batch.columns)
    current, at_sampler = columns.pop("current_logprobs", None), columns.pop("at_sampler")
    if several_updates or bool(at_sampler.any()):
        is_sampler = at_sampler & (columns["mask"] != 0)
        if not several_updates or current is None:
            current = torch.zeros_like(columns["mask"])
            columns["prev_is_current"] = (~is_sampler).to(current.dtype)
        columns["prev_logprobs"] = torch.where(is_sampler, columns["generation_logprobs"], current)
    return replace(batch, columns=columns)


def without_logprob_errors(
    batch: TokenBatch, threshold: float, is_fresh: Tensor
) -> tuple[TokenBatch, dict[str, float]]:
    """Masks rows whose mean exp(|sampler - trainer|) is above `threshold`: sampler and trainer disagree."""
    gap = (batch.columns["generation_logprobs"] - batch.columns["current_logprobs"]).abs().exp()
    counted = batch.columns["mask"] * is_fresh
    lengths = batch.response_lengths
    errors = torch.stack(
        [
            (error * own).sum() / own.sum().clamp(min=1)
            for error, own in zip(gap.split(lengths), counted.split(lengths), strict=True)
        ]
    )
    dropped = errors > threshold
    mask = batch.columns["mask"] * ~of_tokens(dropped.tolist(), batch)
    return batch.with_columns(mask=mask), {
        "max_seq_mult_prob_error": float(errors.max()),
        "num_masked_seqs_by_logprob_error": float(dropped.sum()),
    }


def minibatches(
    batch: TokenBatch, groups: Sequence[Group], num_updates: int, *, with_rewarded: bool = False
) -> list[TokenBatch]:
    """The rows in their order, one batch per optimizer update, each with denominators of its own.

    Unscored rollouts count when the batch is split, so a failed reward does not move other rollouts to another update.
    """
    places = [(g, r) for g, group in enumerate(groups) for r in range(len(group.rollouts))]
    per_update = -(-len(places) // num_updates)
    row_of = {place: row for row, place in enumerate(scored_places(groups))}
    batches = []
    for start in range(0, len(places), per_update):
        chosen = [place for place in places[start : start + per_update] if place in row_of]
        part = batch.select([row_of[place] for place in chosen], recount=True)
        if part.num_tokens == 0:
            continue  # an update without gradient would still apply weight decay and momentum
        if with_rewarded:
            part = _with_rewarded(part, [_is_rewarded(groups, place) for place in chosen])
        batches.append(part)
    return batches


def _is_rewarded(groups: Sequence[Group], place: Place) -> bool:
    reward = groups[place[0]].rollouts[place[1]].score.reward
    return reward is not None and reward > 0


def _with_rewarded(batch: TokenBatch, is_rewarded: Sequence[bool]) -> TokenBatch:
    """`rewarded` adds up to 1 over the trained tokens of rewarded answers: its denominator is taken over the whole
    batch.
    """
    counted = batch.columns["mask"] * of_tokens(is_rewarded, batch)
    return batch.with_columns(rewarded=counted / counted.sum().clamp(min=1))
