"""`WeightSync`: how the trainer's weights reach the engines."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from posttrain.orchestration.rank import Rank
from posttrain.orchestration.workers import WorkerGroup, call_all
from posttrain.policy.weight_files import Handover

_REMOVAL_S = 10.0


class SharedWeights:
    """For an engine that samples from the trainer's own tensors: an update is published as it is made."""

    def publish(self, version: int) -> None:
        pass


class WeightsOfRanks:
    """For engines that have a copy of the weights and share the device of a rank, which hands them over."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    def publish(self, version: int) -> None:
        call_all(self._ranks, Rank.publish, version)


class PushedWeights:
    """For engines in processes of their own. Nothing samples while weights are handed over."""

    def __init__(self, ranks: WorkerGroup, to: Handover) -> None:
        self._ranks, self._to = ranks, to
        self._file: Path | None = None  # None: nothing was published yet

    def publish(self, version: int) -> None:
        sent = call_all(self._ranks, Rank.send_weights, self._to)[0]
        assert sent is not None, "the first rank writes"
        self._file = sent.file
        call_all(self._ranks.engines, Rank.receive_weights, sent)

    def ensure_published(self) -> None:
        """Before anything is sampled: a resumed run has other weights than the model that engines are built with."""
        if self._file is None:
            self.publish(0)

    def close(self) -> None:
        """The file goes before the ranks do. It may be on their machine alone, or the rank may have died."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        with suppress(Exception):
            self._ranks.workers[0].submit(Rank.remove_weights).result(timeout=_REMOVAL_S)
