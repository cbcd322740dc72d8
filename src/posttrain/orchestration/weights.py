"""`WeightSync`: how the trainer's weights reach the engines."""

from __future__ import annotations

from contextlib import suppress

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
        self._is_published = False

    def publish(self, version: int) -> None:
        sent = call_all(self._ranks, Rank.send_weights, self._to)[0]
        assert sent is not None, "the first rank writes"
        call_all(self._ranks.engines, Rank.receive_weights, sent)
        self._is_published = True

    def ensure_published(self) -> None:
        """Before anything is sampled: a resumed run has other weights than the model that engines are built with."""
        if not self._is_published:
            self.publish(0)

    def close(self) -> None:
        """The file goes before the ranks do."""
        with suppress(Exception):  # a rank that died or hangs leaves it to the next attempt of the run
            self._ranks.workers[0].submit(Rank.remove_weights).result(timeout=_REMOVAL_S)
