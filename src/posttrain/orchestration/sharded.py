"""`Trainer` and `Engine` over any number of ranks: shard, call, merge. With one rank, the shard is everything.

`WeightSync` is here too: how the trainer's weights reach the engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.checkpointing.background import wait_for_marks
from posttrain.config.placement import REFERENCE
from posttrain.data.packing import MicroBatching, cost, packing_metrics, plan_micro_batches
from posttrain.engines.weights import Handover, SentWeights
from posttrain.errors import InputError
from posttrain.orchestration.ahead import ReferenceAhead
from posttrain.orchestration.deadlines import deadline_s
from posttrain.orchestration.rank import MicroBatches, Rank
from posttrain.orchestration.workers import WorkerGroup, call_all, gather
from posttrain.policy.objectives import ValueLoss
from posttrain.policy.objectives.reduce import combine_metrics
from posttrain.policy.parallel.mesh import Mesh
from posttrain.roles import Objective, Progress, ShowProgress, StopPoints, no_progress
from posttrain.types import (
    Completion,
    NoiseKey,
    OpenGroup,
    PrefillTokens,
    Quota,
    Sampling,
    Task,
    TokenBatch,
    UpdateReport,
)

T = TypeVar("T")
_LOOK_PERIOD_S = 0.1  # for whole groups, while others are sampled
_CALLS_PER_PASS = 8  # a pass without gradients can stop between calls
# Equal on every rank, so not summed.
_SAME_ON_EVERY_RANK = ("grad_norm", "update_skipped", "lr", "expert_load_max", "router_entropy", "router_mismatch")


class NeverStops:
    """`StopPoints` of a program that is not asked to stop."""

    def check(self) -> None: ...

    def commit(self) -> None: ...


@dataclass
class ShardedTrainer:
    group: WorkerGroup
    train: MicroBatching  # micro-batches of updates
    score: MicroBatching  # of passes without gradients, which need less memory
    seed: int
    show_progress: ShowProgress = no_progress
    stop: StopPoints = field(default_factory=NeverStops)
    num_updates: int = 0

    def __post_init__(self) -> None:
        own = self.group.beside(REFERENCE)
        self.reference = self.group if own is None else own
        self._ahead = None if own is None else ReferenceAhead(own, self.score, lambda: self.stop.check())

    def begin_reference(self, group: OpenGroup) -> None:
        """Of a reference on devices of its own, begin the log-probabilities of a whole group, from any thread."""
        if self._ahead is not None:
            self._ahead.begin(group)

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.stop.commit()
        report = self._updated("training", Rank.update, batch, objective)
        self.num_updates += 1
        return report

    def _updated(
        self, label: str, operation: Callable[..., dict[str, float]], batch: TokenBatch, objective: Objective
    ) -> UpdateReport:
        shards, num_tokens, packing = self._shards(batch, self.train, objective.keeps_groups_whole)
        seed = (self.seed * 1_000_003 + self.num_updates) % 2**63
        results = self._pass(label, operation, shards, objective, seed)
        results = self.group.mesh.one_per_shard(results)
        same = {name: results[0][name] for name in _SAME_ON_EVERY_RANK if name in results[0]}
        sums = [{k: v for k, v in result.items() if k not in same} for result in results]
        return UpdateReport({**combine_metrics(sums), **same, **packing}, num_tokens)

    def evaluate(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.stop.check()
        shards, num_tokens, _ = self._shards(batch, self.score, objective.keeps_groups_whole)
        results = self._pass("validation", Rank.evaluate, shards, objective)
        return UpdateReport(combine_metrics(self.group.mesh.one_per_shard(results)), num_tokens)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self._token_column(batch, Rank.logprobs)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        pieces = [None] * len(batch.responses) if self._ahead is None else self._ahead.take(batch)
        rows = [row for row, piece in enumerate(pieces) if piece is None]
        if not rows:
            return torch.cat([piece for piece in pieces if piece is not None])
        rest = batch if len(rows) == len(pieces) else batch.select(rows)
        column = self._token_column(rest, Rank.reference_logprobs, self.reference)
        for row, piece in zip(rows, column.split(rest.response_lengths), strict=True):
            pieces[row] = piece
        return torch.cat([piece for piece in pieces if piece is not None])

    def reference_fingerprint(self) -> str:
        return call_all(self.reference, Rank.reference_fingerprint)[0]

    def end_step(self) -> None:
        call_all(self.group, Rank.end_step)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, optimizer: bool) -> None:
        # Ranks may run elsewhere, with another working directory.
        call_all(self.group, Rank.save, folder.absolute(), optimizer)
        if not (folder / "policy").is_dir():
            raise InputError(
                f"checkpointing.checkpoint_dir: {folder.absolute()} is not on a filesystem that the ranks share with "
                "this process"
            )

    def load(self, folder: Path) -> None:
        call_all(self.group, Rank.load, folder.absolute())

    def save_obstacle(self, *, optimizer: bool) -> str:
        return next((why for why in call_all(self.group, Rank.save_obstacle, optimizer) if why), "")

    def prepare_save(self, *, optimizer: bool) -> bool:
        return all(call_all(self.group, Rank.prepare_save, optimizer))

    def begin_save(self, folder: Path, *, optimizer: bool) -> Callable[[Callable[[], bool]], None]:
        call_all(self.group, Rank.begin_save, folder.absolute(), optimizer)
        if self.group.in_process:
            return lambda is_given_up: self._write_here()
        call_all(self.group, Rank.write_save_in_thread)
        return lambda is_given_up: wait_for_marks(folder, self.group.mesh.size, is_given_up, deadline_s("save"))

    def _write_here(self) -> None:
        call_all(self.group, Rank.write_save)

    def take_save_wait_s(self) -> float:
        return max(call_all(self.group, Rank.take_save_wait_s))

    # -- shard, call, merge --------------------------------------------------------------------------------------------

    def _shards(
        self, batch: TokenBatch, batching: MicroBatching, keep_groups_whole: bool
    ) -> tuple[list[MicroBatches], int, dict[str, float]]:
        """Micro-batches by rank, the tokens in them, and how full they are."""
        plan = plan_micro_batches(batch, batching, self.group.mesh.dp, keep_groups_whole=keep_groups_whole)
        num_tokens = sum(cost(batch, rows) for shard in plan for rows in shard)
        packing = packing_metrics(batch, batching, plan, keep_groups_whole=keep_groups_whole)
        return _by_rank(batch, plan, self.group.mesh), num_tokens, packing

    def _token_column(
        self,
        batch: TokenBatch,
        operation: Callable[[Rank, MicroBatches], list[Tensor | None]],
        group: WorkerGroup | None = None,
    ) -> Tensor:
        group = group or self.group
        plan = plan_micro_batches(batch, self.score, group.mesh.dp)
        shards = _by_rank(batch, plan, group.mesh)
        num_parts = len(shards[0])
        per_call = max(1, math.ceil(num_parts / _CALLS_PER_PASS))
        results: list[list[Tensor | None]] = [[] for _ in shards]
        with self.show_progress("logprobs", num_parts) as progress:
            for first in range(0, num_parts, per_call):
                self.stop.check()
                parts = [shard[first : first + per_call] for shard in shards]
                calls = [worker.submit(operation, own) for worker, own in zip(group.workers, parts, strict=True)]
                for result, found in zip(results, gather(operation.__name__, calls, group.unit), strict=True):
                    result += found
                progress(len(parts[0]))
        pieces: list[Tensor | None] = [None] * len(batch.responses)
        for shard, scores in zip(plan, group.mesh.one_per_shard(results), strict=True):
            for rows, score in zip(shard, scores, strict=True):
                if score is not None:
                    lengths = [len(batch.responses[row]) for row in rows]
                    for row, piece in zip(rows, score.split(lengths), strict=True):
                        pieces[row] = piece
        assert all(piece is not None for piece in pieces)
        return torch.cat([piece for piece in pieces if piece is not None])

    def _pass(
        self, label: str, operation: Callable[..., dict[str, float]], shards: Sequence[MicroBatches], *shared: object
    ) -> list[dict[str, float]]:
        """Metrics by rank. Callbacks cannot be sent to other processes; there, progress is shown after the call."""
        with self.show_progress(label, len(shards[0])) as progress:
            local = progress if self.group.in_process else None
            calls = [
                worker.submit(operation, parts, *shared, local)
                for worker, parts in zip(self.group.workers, shards, strict=True)
            ]
            results = gather(operation.__name__, calls)
            if local is None:
                progress(len(shards[0]))
        return results


def _by_rank(batch: TokenBatch, plan: Sequence[Sequence[Sequence[int]]], mesh: Mesh) -> list[MicroBatches]:
    shards = [[batch.select(rows) if rows else None for rows in shard] for shard in plan]
    return [shards[mesh.dp_index(rank)] for rank in range(mesh.size)]


@dataclass
class ActorCritic(ShardedTrainer):
    """The policy and, on the same ranks, a critic. Every update trains the critic first, and then the policy, unless
    the critic is still warming up. Both are in one checkpoint.
    """

    value_loss: ValueLoss = field(default_factory=ValueLoss)
    warmup_updates: int = 0  # of the critic alone
    _is_warming_up: bool = False  # in this step

    def values(self, batch: TokenBatch) -> Tensor:
        """For each response token, the critic's estimate of what follows from it on."""
        return self._token_column(batch, Rank.values)

    def update(self, batch: TokenBatch, objective: Objective) -> UpdateReport:
        self.stop.commit()
        critic = self._updated("critic", Rank.update_critic, batch, self.value_loss)
        renamed = ("critic_grad_norm", "critic_update_skipped", "critic_lr")
        own = {name: critic.metrics[name.removeprefix("critic_")] for name in renamed}
        own |= {name: value for name, value in critic.metrics.items() if name.startswith("value_")}
        self._is_warming_up = self.num_updates < self.warmup_updates
        if self._is_warming_up:
            self.num_updates += 1
            return UpdateReport(own, critic.num_tokens)
        policy = super().update(batch, objective)
        # Of the memory at its peak the larger counts.
        largest = {name: max(value, critic.metrics.get(name, value)) for name, value in policy.metrics.items()}
        peaks = {name: value for name, value in largest.items() if name.startswith("peak_")}
        return replace(policy, metrics={**policy.metrics, **peaks, **own})

    def end_step(self) -> None:
        call_all(self.group, Rank.end_critic_step)
        if not self._is_warming_up:
            super().end_step()


class ShardedEngine:
    """Whole groups go to one data-parallel rank: a prompt is computed once. Results keep the order of the tasks.

    Ranks that share layers get the same groups and draw the same tokens.
    """

    def __init__(
        self, group: WorkerGroup, prepare: Callable[[], None] = lambda: None, *, mesh: Mesh | None = None
    ) -> None:
        self.group = group
        self.prepare = prepare  # called before anything is sampled
        self.mesh = mesh or group.mesh.for_sampling
        self.when_whole: Callable[[OpenGroup], None] | None = None
        # Draw and sample, None for all samples of a draw -> shard that has their pages.
        self._shard_of: dict[tuple[int, int | None], int] | None = None

    def telling(self, when_whole: Callable[[OpenGroup], None]) -> ShardedEngine:
        """This engine, which calls `when_whole` with each whole group while others are sampled, if its workers tell."""
        engine = copy(self)
        engine.when_whole = when_whole
        return engine

    def keep_prefixes(self, wanted: bool) -> PrefillTokens | None:
        """While prefixes are kept, a conversation stays on the rank that began it."""
        self._shard_of = {} if wanted else None
        found = self.mesh.one_per_shard(call_all(self.group, Rank.keep_prefixes, wanted))
        known = [one for one in found if one is not None]
        return sum(known, PrefillTokens()) if len(known) == len(found) else None

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        sampled = self._on_ranks(
            Rank.generate, tasks, tasks, (num_samples, sampling, key), progress, are_groups=num_samples > 1
        )
        if progress is not None and not self.group.in_process:
            progress(len(tasks) * num_samples)
        return sampled

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        """Each data-parallel rank gets its share of the groups and the quota, and ends its round independently."""
        own = None
        if quota is not None:
            assert quota.num_groups % self.mesh.dp == 0, "checked when the run was built"
            own = replace(quota, num_groups=quota.num_groups // self.mesh.dp)
        return self._on_ranks(
            Rank.sample_round,
            groups,
            [group.task for group in groups],
            (sampling, seed, own),
            progress,
            are_groups=True,
        )

    def _on_ranks(
        self,
        operation: Callable[..., list[T]],
        items: Sequence[object],
        tasks: Sequence[Task],
        shared: tuple[object, ...],
        progress: Progress | None,
        *,
        are_groups: bool,
    ) -> list[T]:
        """One result for each item, in order. Every data-parallel rank gets its items and the `shared` arguments."""
        self.prepare()
        mesh, shards = self.mesh, self._shards(tasks, are_groups=are_groups)
        callback = progress if self.group.in_process else None  # it cannot be sent to another process
        calls = [
            worker.submit(
                operation,
                [item for item, shard in zip(items, shards, strict=True) if shard == mesh.dp_index(rank)],
                *shared,
                callback,
            )
            for rank, worker in enumerate(self.group.workers)
        ]
        if self.when_whole is not None and not self.group.in_process:
            self._tell(calls, deadline_s(operation.__name__), self.when_whole)
        by_shard = [iter(results) for results in mesh.one_per_shard(gather(operation.__name__, calls, self.group.unit))]
        return [next(by_shard[shard]) for shard in shards]

    def _tell(self, calls: Sequence[Future[Any]], limit_s: float, when_whole: Callable[[OpenGroup], None]) -> None:
        end, workers = time.monotonic() + limit_s, self.group.workers
        asked = [worker.take_whole_groups() for worker in workers]
        while any(not call.done() for call in calls) and time.monotonic() < end:
            wait(calls, timeout=_LOOK_PERIOD_S)
            for place, part in enumerate(asked):
                # An answer may be late, and a worker that is starting answers later. What one that died had found is
                # found again.
                if not part.done():
                    continue
                asked[place] = workers[place].take_whole_groups()
                for group in part.result(timeout=0) if part.exception(timeout=0) is None else ():
                    when_whole(group)

    def _shards(self, tasks: Sequence[Task], *, are_groups: bool) -> list[int]:
        """Later turns go where their last one went, unless that was a group's and left a shard idle; others where the
        fewest are. `are_groups`: each task stands for all samples of its draw."""
        num_shards, known = self.mesh.dp, self._shard_of
        if known is None:
            return [place % num_shards for place in range(len(tasks))]
        shards = [known.get((task.draw, task.first_sample), known.get((task.draw, None))) for task in tasks]
        load = [shards.count(shard) for shard in range(num_shards)]
        for place, shard in enumerate(shards):
            if shard is None:
                shards[place] = shard = load.index(min(load))
                load[shard] += 1
        found = [shard for shard in shards if shard is not None]
        for task, shard in zip(tasks, found, strict=True):
            if task.first_token or len(tasks) >= num_shards:
                known[task.draw, None if are_groups else task.first_sample] = shard
        return found

    def release(self) -> None:
        call_all(self.group, Rank.release)


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
