"""`WeightSync`: how the trainer's weights reach the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace

from posttrain.engines.weights import Handover, SentWeights
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.workers import WorkerGroup, call_all

_REMOVAL_S = 10.0


class SharedWeights:
    """For an engine that samples from the trainer's own tensors: updates take effect immediately."""

    def publish(self, version: int) -> None:
        pass


class WeightsOfRanks:
    """For engines that have a copy of the weights and share the device of a rank, which sends them."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    def publish(self, version: int) -> None:
        call_all(self._ranks, Rank.publish, version)


class PushedWeights:
    """For dedicated engines. No sampling runs while weights are transferred."""

    def __init__(self, ranks: WorkerGroup, to: Handover, say: Callable[[str], None]) -> None:
        self._ranks, self._to, self._say = ranks, to, say
        self._has_begun = False

    def publish(self, version: int) -> None:
        self._has_begun = True
        sent = call_all(self._ranks, Rank.send_weights, self._to)
        if not self._sent_over_gpu_memory(sent):
            call_all(self._ranks.engines, Rank.receive_weights, sent)

    def _sent_over_gpu_memory(self, sent: Sequence[SentWeights]) -> bool:
        """False if the GPUs are not on one machine or have no peer access; it is then not tried again."""
        why = next((one.why_no_bucket for one in sent if one.why_no_bucket), "")
        num_lots = max(len(one.lots) for one in sent)
        for lot in range(0 if why else num_lots):
            call_all(self._ranks, Rank.fill_bucket, lot)
            found = call_all(self._ranks.engines, Rank.receive_weights, sent, lot)
            if why := next(filter(None, found), ""):
                break
        if why:
            self._say(f"weights go to the engines through files in {sent[0].file.parent}, not over CUDA IPC: {why}")
            self._to = replace(self._to, over_gpu_memory=False)
        return num_lots > 0 and not why

    def ensure_published(self) -> None:
        """Must run before sampling: a resumed run has other weights than the model that engines load."""
        if not self._has_begun:
            self.publish(0)

    def close(self) -> None:
        """Removes files before ranks stop. Files may exist only on the ranks' machines, or a rank may have died."""
        if not self._has_begun:
            return
        self._to.remove_files()
        with suppress(Exception):
            wait([worker.submit(Rank.remove_weights) for worker in self._ranks.workers], timeout=_REMOVAL_S)
