"""`Policy` and `Generator` over any number of ranks: shard, call, merge. With one rank, the shard is everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.checkpointing.marks import wait_for_marks
from posttrain.data.packing import MicroBatching, cost, packing_metrics, plan_micro_batches
from posttrain.errors import InputError
from posttrain.orchestration.local import WorkerGroup
from posttrain.policy.objectives.reduce import combine_metrics
from posttrain.roles import Objective, Progress, ShowProgress, no_progress
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch, UpdateReport

# Equal on every rank, so not to be added up.
_SAME_ON_EVERY_RANK = ("grad_norm", "update_skipped", "lr")


class ShardedPolicy:
    def __init__(
        self,
        workers: WorkerGroup,
        train: MicroBatching,
        score: MicroBatching,
        seed: int,
        show_progress: ShowProgress = no_progress,
    ) -> None:
        self.workers = workers
        self.show_progress = show_progress
        self.train = train  # micro-batches of updates
        self.score = score  # of passes without gradients, which need less memory
        self.seed = seed
        self.num_updates = 0

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        parts, num_tokens, packing = self._shards(batch, self.train, objective.keeps_groups_whole)
        seed = (self.seed * 1_000_003 + self.num_updates) % 2**63
        with self.show_progress("training", len(parts[0])) as progress:
            results = self._call("update", parts, objective, seed, self._local(progress))
            if not self.workers.in_process:
                progress(len(parts[0]))
        self.num_updates += 1
        same = {name: results[0][name] for name in _SAME_ON_EVERY_RANK}
        sums = [{k: v for k, v in result.items() if k not in same} for result in results]
        return UpdateReport({**combine_metrics(sums), **same, **packing}, num_tokens)

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        parts, num_tokens, _ = self._shards(batch, self.score, objective.keeps_groups_whole)
        with self.show_progress("validation", len(parts[0])) as progress:
            results = self._call("evaluate", parts, objective, self._local(progress))
            if not self.workers.in_process:
                progress(len(parts[0]))
        return UpdateReport(combine_metrics(results), num_tokens)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self._token_column(batch, "logprobs")

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        return self._token_column(batch, "reference_logprobs")

    def reference_fingerprint(self) -> str:
        return str(self._call_all("reference_fingerprint")[0])

    def end_step(self) -> None:
        self._call_all("end_step")

    def save(self, folder: Path, *, optimizer: bool) -> None:
        # Ranks may run elsewhere, with another working directory.
        self._call_all("save", str(folder.absolute()), optimizer)
        if not (folder / "policy").is_dir():
            raise InputError(
                f"checkpointing.checkpoint_dir: {folder.absolute()} is not on a filesystem that the ranks share with this process"
            )

    def save_obstacle(self, *, optimizer: bool) -> str:
        """Why `begin_save` cannot be used, for people; empty if it can. To be asked after the first update."""
        return next((why for why in self._call_all("save_obstacle", optimizer) if why), "")

    def prepare_save(self, *, optimizer: bool) -> bool:
        """Take memory for `begin_save` ahead of time. True once all ranks have it; call again until then."""
        return all(self._call_all("prepare_save", optimizer))

    def begin_save(self, folder: Path, *, optimizer: bool) -> Callable[[Callable[[], bool]], None]:
        """Copy the state as it is now, and return what writes it: to be called in another thread while training goes on.

        That function is given another, which says whether nobody waits for the files any more.
        """
        self._call_all("begin_save", str(folder.absolute()), optimizer)
        if self.workers.in_process:
            return lambda is_given_up: self._write_here()
        self._call_all("write_save_in_thread")
        return lambda is_given_up: wait_for_marks(folder, self.workers.size, is_given_up)

    def _write_here(self) -> None:
        self._call_all("write_save")

    def take_save_wait_s(self) -> float:
        """Seconds for which updates have waited for the copy since this was asked last; of the slowest rank."""
        return max(float(waited) for waited in self._call_all("take_save_wait_s"))

    def load(self, folder: Path) -> None:
        self._call_all("load", str(folder.absolute()))

    # -- shard, call, merge --------------------------------------------------------------------------------------------

    def _shards(
        self, batch: TokenBatch, batching: MicroBatching, keep_groups_whole: bool
    ) -> tuple[list[list[TokenBatch | None]], int, dict[str, float]]:
        """Micro-batches by rank, the tokens in them, and how full they are."""
        plan = plan_micro_batches(batch, batching, self.workers.size, keep_groups_whole=keep_groups_whole)
        num_tokens = sum(cost(batch, rows) for rank in plan for rows in rank)
        packing = packing_metrics(batch, batching, plan, keep_groups_whole=keep_groups_whole)
        return [[batch.select(rows) if rows else None for rows in rank] for rank in plan], num_tokens, packing

    def _token_column(self, batch: TokenBatch, method: str) -> Tensor:
        plan = plan_micro_batches(batch, self.score, self.workers.size)
        shards = [[batch.select(rows) if rows else None for rows in rank] for rank in plan]
        pieces: list[Tensor | None] = [None] * len(batch.responses)
        for rank, scores in zip(plan, self._call(method, shards), strict=True):
            for rows, score in zip(rank, scores, strict=True):
                if rows:
                    lengths = [len(batch.responses[row]) for row in rows]
                    for row, piece in zip(rows, score.split(lengths), strict=True):
                        pieces[row] = piece
        assert all(piece is not None for piece in pieces)
        return torch.cat([piece for piece in pieces if piece is not None])

    def _local(self, progress: Progress) -> Progress | None:
        """A callback cannot travel to another process; there, progress comes when all is done."""
        return progress if self.workers.in_process else None

    def _call(self, method: str, shards: Sequence[Any], *rest: Any) -> list[Any]:
        return self.workers.call(method, [(shard, *rest) for shard in shards])

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return self.workers.call(method, [arguments] * self.workers.size)


class ShardedGenerator:
    """Whole groups go to one rank, so that a prompt is computed once. Results come back in the order of the tasks."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        size = self.workers.size
        shards = [list(tasks[rank::size]) for rank in range(size)]
        callback = progress if self.workers.in_process else None  # it cannot travel to another process
        results = self.workers.call("generate", [(shard, num_samples, sampling, key, callback) for shard in shards])
        if progress is not None and callback is None:
            progress(len(tasks) * num_samples)
        merged: list[list[Completion]] = [[] for _ in tasks]
        for rank, groups in enumerate(results):
            merged[rank::size] = groups
        return merged
