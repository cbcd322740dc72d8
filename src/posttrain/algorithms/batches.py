"""The batches that algorithms train on: of rollouts, and of given answers for the algorithms that sample nothing.

**Rollouts**: one row per scored rollout (per branch of an agent's), cut into one batch per optimizer update. A row has
the log-probabilities of its behaviour policy, which sampled it. For recorded answers, whose behaviour policy is
unknown, the initial policy is used instead. Ratios are taken against `prev_logprobs`, the anchor: the policy before the
first update of the step for on-policy samples, the behaviour policy for all others. With importance sampling
correction, the anchor of answers that earlier weights sampled is the policy before the first update as well, and the
loss weighs them by the ratio of the two. `prev_is_current` marks rows anchored at the policy of the update itself,
which needs no separate forward pass if there is only one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from posttrain.data.packing import PACK
from posttrain.types import ROUTES, Completion, Example, Group, Judged, Pair, TokenBatch

T_co = TypeVar("T_co", covariant=True)


class RowStream(Protocol[T_co]):
    """Rows of data in their order."""

    def take(self, count: int) -> Sequence[T_co]: ...


Place = tuple[int, int]  # (group, rollout)


def scored_rows(groups: Sequence[Group]) -> list[tuple[Place, Completion]]:
    """The rows of a batch: of all rollouts that are scored, or judged by a teacher, in order, each branch."""
    return [
        ((g, r), row)
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group.rollouts)
        if rollout.score.scored or rollout.is_taught
        for row in rollout.completion.rows
    ]


def scored_places(groups: Sequence[Group]) -> list[Place]:
    """The rollout of each row."""
    return [place for place, _ in scored_rows(groups)]


def rollout_batch(groups: Sequence[Group], *, overlong_filtering: bool = False) -> TokenBatch:
    """All scored rollouts of the step. Those dropped by `overlong_filtering` are masked, and count for advantages."""
    scored = scored_rows(groups)
    rows = [row for _, row in scored]
    prompt_of = [(g, row.prompt_ids or groups[g].task.prompt_ids) for (g, _), row in scored]
    index = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt_of))}
    mask = [
        float(trained and not (overlong_filtering and row.finish_reason == "length"))
        for row in rows
        for trained in row.trained
    ]
    sampler = [logprob for row in rows for logprob in row.logprobs or (0.0,) * len(row.token_ids)]
    batch = TokenBatch.build(
        prompts=[prompt for _, prompt in index],
        responses=[row.token_ids for row in rows],
        prompt_of=[index[prompt] for prompt in prompt_of],
        columns={
            "mask": torch.tensor(mask, dtype=torch.float32),
            "generation_logprobs": torch.tensor(sampler, dtype=torch.float32),
        },
        images=[groups[g].task.images for g, _ in index],
    )
    return with_routes(batch, rows)


def with_routes(batch: TokenBatch, answers: Sequence[Completion]) -> TokenBatch:
    """With the experts that the sampler of its rows chose, where it recorded them."""
    known = next((answer.routed_experts for answer in answers if answer.routed_experts is not None), None)
    if known is None:
        return batch
    columns: list[Tensor] = []
    of_prompts: list[Tensor | None] = [None] * len(batch.prompts)
    for prompt, answer in zip(batch.prompt_of, answers, strict=True):
        column = torch.full((len(answer.token_ids), *known.shape[1:]), -1, dtype=torch.int16)
        if (routes := answer.routed_experts) is not None:
            # The state of the prompt's last token leads to the first token of the answer.
            last = len(batch.prompts[prompt]) - 1
            own = routes[last : last + len(column)]
            column[: len(own)] = own
            of_prompts[prompt] = routes[:last]
        columns.append(column)
    return replace(batch.with_columns(**{ROUTES: torch.cat(columns)}), prompt_routes=tuple(of_prompts))


def of_tokens(rows: Sequence[bool], batch: TokenBatch) -> Tensor:
    """A flag of each row, repeated for its tokens."""
    return _per_token(rows, batch.response_lengths).bool()


def with_reference_as_behavior(batch: TokenBatch, is_recorded: Tensor) -> TokenBatch:
    """Recorded answers use the log-probabilities of the initial policy, as their behaviour policy is unknown."""
    columns = batch.columns
    sampler = torch.where(is_recorded, columns["reference_logprobs"], columns["generation_logprobs"])
    return batch.with_columns(generation_logprobs=sampler)


def with_anchor(batch: TokenBatch, *, several_updates: bool) -> TokenBatch:
    """Adds `prev_logprobs` where an anchor is not the current policy; drops `current_logprobs`, `at_sampler`.

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
    rows_of: dict[Place, list[int]] = {}
    for row, place in enumerate(scored_places(groups)):
        rows_of.setdefault(place, []).append(row)
    batches = []
    for start in range(0, len(places), per_update):
        chosen = [place for place in places[start : start + per_update] for _ in rows_of.get(place, ())]
        part = batch.select([row for place in dict.fromkeys(chosen) for row in rows_of[place]], recount=True)
        if part.num_tokens == 0:
            continue  # an update without gradient would still apply weight decay and momentum
        if with_rewarded:
            # `rewarded` adds up to 1 over the trained tokens of rewarded answers of the whole batch.
            rewards = [groups[g].rollouts[r].score.reward for g, r in chosen]
            is_rewarded = [reward is not None and reward > 0 for reward in rewards]
            counted = part.columns["mask"] * of_tokens(is_rewarded, part)
            part = part.with_columns(rewarded=counted / counted.sum().clamp(min=1))
        batches.append(part)
    return batches


MAX_SHIFT = 32  # largest shift tried


def pair_batch(pairs: Sequence[Pair]) -> TokenBatch:
    """Chosen, rejected, chosen, rejected, …; both answers of a pair share their prompt.

    `given_rewards` is each answer's reward in the data; `num_class_tokens` is the number of tokens in all chosen (or
    all rejected) answers of the batch.
    """
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    lengths = [len(ids) for ids in responses]
    rewards = [reward for pair in pairs for reward in (pair.chosen_reward, pair.rejected_reward)]
    num_tokens = [sum(lengths[0::2]), sum(lengths[1::2])] * len(pairs)
    packs = torch.tensor([pair.pack for pair in pairs for _ in range(2)], dtype=torch.long)
    packed = {PACK: packs.repeat_interleave(torch.tensor(lengths, dtype=torch.long))} if (packs >= 0).any() else {}
    return TokenBatch.build(
        prompts=[pair.prompt_ids for pair in pairs],
        responses=responses,
        prompt_of=[index for index in range(len(pairs)) for _ in range(2)],
        columns={
            "given_rewards": _per_token(rewards, lengths),
            "num_class_tokens": _per_token(num_tokens, lengths),
            **packed,
        },
        images=[pair.images for pair in pairs],
    )


def judged_batch(answers: Sequence[Judged]) -> TokenBatch:
    """Single answers with their label, and the number of answers and tokens in the batch with the same label.

    Answers to the same prompt share its computation.
    """
    asked = [(answer.prompt_ids, answer.images) for answer in answers]  # tokens of different images are the same
    place = {prompt: index for index, prompt in enumerate(dict.fromkeys(asked))}
    lengths = [len(answer.response_ids) for answer in answers]
    alike = {good: [n for n, a in zip(lengths, answers, strict=True) if a.desirable is good] for good in (True, False)}
    return TokenBatch.build(
        prompts=[prompt for prompt, _ in place],
        responses=[answer.response_ids for answer in answers],
        prompt_of=[place[prompt] for prompt in asked],
        columns={
            "desirable": _per_token([answer.desirable for answer in answers], lengths),
            "num_class_sequences": _per_token([len(alike[answer.desirable]) for answer in answers], lengths),
            "num_class_tokens": _per_token([sum(alike[answer.desirable]) for answer in answers], lengths),
        },
        images=[images for _, images in place],
    )


def mismatched_batch(batch: TokenBatch, max_total_tokens: int) -> TokenBatch:
    """Each prompt with the answer to another prompt, in the same prompt order. Long sequences are truncated."""
    # The shift of answers, in rows, that leaves the fewest with their own prompt; 1 if all prompts differ.
    prompt_of, rows = batch.prompt_of, range(len(batch.prompt_of))
    shifts = range(1, max(2, min(len(rows), MAX_SHIFT)))
    shift = min(shifts, key=lambda shift: sum(prompt_of[row] == prompt_of[row - shift] for row in rows))
    lengths = [max(1, max_total_tokens - len(batch.prompts[prompt])) for prompt in batch.prompt_of]
    responses = [batch.responses[row - shift][:length].tolist() for row, length in enumerate(lengths)]
    return TokenBatch.build(
        prompts=[prompt.tolist() for prompt in batch.prompts],
        responses=responses,
        prompt_of=batch.prompt_of,
        images=batch.prompt_images,
    )


def example_batch(examples: Sequence[Example]) -> TokenBatch:
    masks = [list(example.mask) or [True] * len(example.response_ids) for example in examples]
    return TokenBatch.build(
        prompts=[example.prompt_ids for example in examples],
        responses=[example.response_ids for example in examples],
        prompt_of=range(len(examples)),
        columns={"mask": torch.tensor([float(trained) for mask in masks for trained in mask])},
        images=[example.images for example in examples],
    )


def _per_token(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
