"""What the preference algorithms share beside their loss: the frozen reference, and metrics that are shares of counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from posttrain.types import TokenBatch


class Reference(Protocol):
    """Log-probabilities under the frozen reference, computed once for each answer if there is room to keep them."""

    def logprobs(self, batch: TokenBatch, step: int, *, keep: bool = True) -> tuple[Tensor, float]:
        """One value per response token, and the share of the tokens whose value was known already."""
        ...


def with_accuracy(measured: Mapping[str, float], num_rows: float) -> dict[str, float]:
    """Counts as shares of the rows. A tie is half right: it is what guessing would earn.

    Divided once, from whole numbers: adding up shares of micro-batches would give accuracies above 1.
    """
    metrics = dict(measured)
    right, ties = metrics.pop("num_ranked_right"), metrics.pop("num_ties")
    rows = max(num_rows, 1.0)
    return {**metrics, "accuracy": (right + ties / 2) / rows, "tie_rate": ties / rows}
