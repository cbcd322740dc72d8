"""Which checkpoints a run keeps, by steps and metrics; NeMo RL's rule.

- Steps that are multiples of `save_period` compete for `keep_top_k` places: the best metric first, the newer on a tie, a
  checkpoint without the metric last. With no metric the newest win.
- Steps in between (saved because the run was interrupted, or ended) are there to resume from; they are surplus as soon as
  a newer one exists.
- The newest is always kept, whatever its metric, so there can be `keep_top_k` + 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def surplus_steps(
    metrics: Mapping[int, float | None],  # step -> its metric, for every checkpoint there is
    *,
    keep_top_k: int | None,
    save_period: int,
    use_metric: bool,
    higher_is_better: bool,
    always_keep: Collection[int] = (),
) -> list[int]:
    """The steps to remove, oldest first."""
    if keep_top_k is None or not metrics:
        return []
    worst = -math.inf

    def rank(step: int) -> tuple[float, int]:
        metric = metrics[step]
        if not use_metric:
            return worst, step
        if metric is None or math.isnan(metric):
            return worst, step
        return (metric if higher_is_better else -metric), step

    candidates = sorted((step for step in metrics if step % save_period == 0), key=rank, reverse=True)
    kept = {*candidates[:keep_top_k], max(metrics), *always_keep}
    return sorted(step for step in metrics if step not in kept)
