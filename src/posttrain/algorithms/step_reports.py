"""What a step reports: timings of its stages, metrics and warnings of its rollouts, and values of single tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms.advantages import has_signal
from posttrain.algorithms.batches import scored_rows
from posttrain.types import ROUTES, Group, StepReport, TokenBatch, TokenTrace


class StageClock:
    def __init__(self) -> None:
        self.spans: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans[stage] = self.spans.get(stage, 0.0) + time.perf_counter() - start

    def add(self, spans: Mapping[str, float]) -> None:
        """Add stages measured elsewhere."""
        for stage, seconds in spans.items():
            self.spans[stage] = self.spans.get(stage, 0.0) + seconds

    def finish(self, total: str = "total_step_time") -> dict[str, float]:
        """All stages, and the total time since construction."""
        return {**self.spans, total: time.perf_counter() - self._start}


def num_sequence_tokens(batch: TokenBatch) -> int:
    """Token count of full sequences: each response with its prompt, even if the prompt is shared."""
    return sum(len(batch.prompts[p]) + len(r) for p, r in zip(batch.prompt_of, batch.responses, strict=True))


def batch_report(
    batch: TokenBatch, metrics: Mapping[str, float], timings_s: Mapping[str, float], *, answers_per_sample: int = 1
) -> StepReport:
    """The report of a step, or of a validation, that trains on given answers. A pair is one sample with two answers."""
    num_samples = len(batch.responses) // answers_per_sample
    return StepReport(metrics, timings_s, num_tokens=num_sequence_tokens(batch), num_samples=num_samples)


def with_accuracy(measured: Mapping[str, float], num_rows: float) -> dict[str, float]:
    """Counts divided by the number of rows. A tie counts as half correct, as for a random guess.

    Integer counts are divided once: adding per-micro-batch fractions can give accuracies above 1.
    """
    metrics = dict(measured)
    right, ties = metrics.pop("num_ranked_right"), metrics.pop("num_ties")
    rows = max(num_rows, 1.0)
    return {**metrics, "accuracy": (right + ties / 2) / rows, "tie_rate": ties / rows, "num_valid_samples": num_rows}


MAX_GROUPS_COMPARED, MAX_TOKENS_COMPARED = 64, 1024  # limits the cost of the repetition metric to milliseconds


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards over scored rollouts only; without any, `reward` is omitted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts if r.score.reward is not None]
    lengths = [r.completion.num_sampled for r in rollouts]
    distinct = [len({r.completion.token_ids for r in group.rollouts}) / len(group.rollouts) for group in groups]
    metrics = {
        "unscored": float(len(rollouts) - len(rewards)),
        "mean_generation_length": statistics.fmean(lengths),
        "max_generation_length": float(max(lengths)),
        "num_generated_tokens": float(num_generated_tokens(groups)),
        "truncation_rate": statistics.fmean(r.truncated for r in rollouts),
        "groups_with_signal": statistics.fmean(has_signal(group) for group in groups),
        "num_samples": float(len(rollouts)),
        "distinct_answers": statistics.fmean(distinct),
        "repetition": _repetition(groups),
    }
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
        metrics["reward_min"] = min(rewards)
        metrics["reward_max"] = max(rewards)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}": statistics.fmean(values) for name, values in parts.items()}
    return metrics | _conversation_metrics(groups)


def _repetition(groups: Sequence[Group]) -> float:
    """Fraction of 4-grams that occurred earlier in the same answer, over the first answer of each group."""
    shares = []
    for group in groups[:MAX_GROUPS_COMPARED]:
        ids = group.rollouts[0].completion.token_ids[:MAX_TOKENS_COMPARED]
        runs = [ids[i : i + 4] for i in range(len(ids) - 3)]
        shares.append(1 - len(set(runs)) / len(runs) if runs else 0.0)
    return statistics.fmean(shares)


def num_generated_tokens(groups: Sequence[Group]) -> int:
    """Tokens sampled in this run, without recorded answers."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return sum(completion.num_sampled for completion in completions if completion.logprobs)


def _conversation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over multi-turn rollouts, if there are any."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    found = [(c, c.conversation) for c in completions if c.conversation is not None]
    if not found:
        return {}
    names = dict.fromkeys(name for _, conversation in found for name in conversation.counts)
    return {
        "turns": statistics.fmean(conversation.num_turns for _, conversation in found),
        "environment_tokens": statistics.fmean(
            sum(len(row.token_ids) for row in c.rows) - c.num_sampled for c, _ in found
        ),
        **{name: statistics.fmean(conversation.counts.get(name, 0.0) for _, conversation in found) for name in names},
    }


def rollout_warnings(groups: Sequence[Group], step: int, *, compares: bool = True) -> list[str]:
    """`compares`: nothing is learnt from rewards that are all equal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.score.reward for r in rollouts if r.score.reward is not None]
    if not rewards and any(rollout.is_taught for rollout in rollouts):
        return []
    if not rewards:
        first = next((r.score.error for r in rollouts if r.score.error), "no reason given")
        return [f"step {step}: none of the {len(rollouts)} rollouts could be scored, so nothing was learnt ({first})"]
    if len(set(rewards)) == 1 and compares:
        truncated = statistics.fmean(r.truncated for r in rollouts)
        hint = (
            f"{truncated:.0%} of the completions were cut off at policy.generation.max_new_tokens"
            if truncated > 0.5
            else "the prompts are too easy or too hard for the model, or the reward does not see what differs"
        )
        return [
            f"step {step}: all {len(rewards)} rewards are {rewards[0]:g}, so every advantage is 0 and nothing is "
            f"learnt; {hint}"
        ]
    return []


@dataclass(frozen=True)
class TokenSampling:
    """Which answers to trace: all answers of `num_groups` groups, every `period` steps; period 0: none."""

    period: int
    num_groups: int

    def is_due(self, step: int) -> bool:
        """Always true for the first step."""
        return self.period > 0 and (step == 1 or step % self.period == 0)


def token_traces(
    groups: Sequence[Group], batch: TokenBatch, num_groups: int, logprobs: Callable[[TokenBatch], Tensor]
) -> tuple[TokenTrace, ...]:
    """Traces of groups spread evenly over the step. `batch` has the rows of `scored_rows`, with their advantages.

    `logprobs` computes log-probabilities under the current policy if the step has not. Recorded answers are skipped
    because their sampler is unknown.
    """
    count = min(num_groups, len(groups))
    chosen = {len(groups) * index // count for index in range(count)}
    scored = scored_rows(groups)
    rows = [row for row, ((g, _), answer) in enumerate(scored) if g in chosen and answer.logprobs]
    if not rows:
        return ()
    part = batch.select(rows)
    if "current_logprobs" not in part.columns:
        part = part.with_columns(current_logprobs=logprobs(part))
    columns = {name: [piece.tolist() for piece in part.column_parts(name)] for name in part.columns if name != ROUTES}
    found = []
    for index, row in enumerate(rows):
        (g, r), completion = scored[row]
        found.append(
            TokenTrace(
                draw=groups[g].task.draw,
                sample=r,
                token_ids=completion.token_ids,
                trained=completion.trained,
                sampler_logprobs=completion.logprobs,
                trainer_logprobs=tuple(columns["current_logprobs"][index]),
                advantages=tuple(columns["advantages"][index]),
                reference_logprobs=tuple(columns["reference_logprobs"][index])
                if "reference_logprobs" in columns
                else (),
            )
        )
    return tuple(found)
