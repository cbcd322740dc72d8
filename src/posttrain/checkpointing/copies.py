"""Whether a checkpoint gets a consolidated copy of the model in `step_N/hf`: `checkpointing.save_consolidated`.

With `auto` it does if the cost is low: up to 2 % of the training time since the previous checkpoint if the run waits
for it; up to half of that training time in the background, so that the next save does not wait either. The cost is that
of the latest copy of this run. Before the first, it is estimated from the rate at which the checkpoint itself was
written. Independent of how copies are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_SHARE_BLOCKING, _SHARE_BESIDE = 0.02, 0.5
_START_S = 2.0  # a model is built, and a process started where it is made in one
_NUM_PASSES = 6  # over the model's bytes: read, write, hash; then it is loaded in float32 and compared


class Exporter(Protocol):
    """Adds the copy to the folder of a checkpoint, or warns why there is none."""

    def __call__(self, checkpoint: Path) -> None:
        """In this process."""
        ...

    def beside(self, checkpoint: Path, is_given_up: Callable[[], bool]) -> None:
        """In another process, which shares no random state, locks or GPU with training."""
        ...


@dataclass
class CopyRule:
    by_cost: bool  # False: every checkpoint gets one
    model_bytes: int
    measured_s: float | None = None  # of the latest copy

    def cost_s(self, save_s: float, saved_bytes: int) -> float:
        if self.measured_s is not None:
            return self.measured_s
        return _START_S + _NUM_PASSES * self.model_bytes * save_s / max(saved_bytes, 1)

    def reason_against(self, *, save_s: float, saved_bytes: int, trained_s: float, blocks: bool) -> str | None:
        """None if the checkpoint gets a copy. `trained_s`: seconds of training since the checkpoint before."""
        share = _SHARE_BLOCKING if blocks else _SHARE_BESIDE
        cost_s = self.cost_s(save_s, saved_bytes)
        if not self.by_cost or cost_s <= share * trained_s:
            return None
        return (
            f"it would take {cost_s:.2g} s after {trained_s:.2g} s of training, more than {100 * share:g} %. `posttrain convert` "
            "makes one; checkpointing.save_consolidated=true makes one at every save, false none"
        )
