"""Per-token values of some answers of a step, recorded for inspection. Training does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms.rollout_batches import scored_places
from posttrain.types import Group, TokenBatch, TokenTrace


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
    """Traces of groups spread evenly over the step. `batch` has a row for each scored rollout, with its advantages.

    `logprobs` computes log-probabilities under the current policy if the step has not. Recorded answers are skipped
    because their sampler is unknown.
    """
    count = min(num_groups, len(groups))
    chosen = {len(groups) * index // count for index in range(count)}
    places = scored_places(groups)
    rows = [row for row, (g, r) in enumerate(places) if g in chosen and groups[g].rollouts[r].completion.logprobs]
    if not rows:
        return ()
    part = batch.select(rows)
    if "current_logprobs" not in part.columns:
        part = part.with_columns(current_logprobs=logprobs(part))
    columns = {name: [piece.tolist() for piece in part.column_parts(name)] for name in part.columns}
    found = []
    for index, row in enumerate(rows):
        g, r = places[row]
        completion = groups[g].rollouts[r].completion
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
