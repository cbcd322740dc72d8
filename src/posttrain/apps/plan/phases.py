"""Peak memory of each phase of a step, and the size of the KV cache, on top of the estimate of one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from posttrain.apps.plan.calibration import Gpu
from posttrain.apps.plan.workload import Workload
from posttrain.policy.memory.rank import GIB, KEPT_CACHE_SHARE, RUNTIME_BYTES, SAMPLING, SCORING, Phase, RankMemory


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a sampling call."""

    bytes_per_token: int
    wanted_bytes: float  # with which no sample waits for pages
    num_bytes: float  # available
    least_bytes: float  # of one sequence
    is_kept: bool  # while training

    @property
    def is_short(self) -> bool:
        return self.num_bytes < self.wanted_bytes

    @property
    def tokens(self) -> float:
        return self.num_bytes / self.bytes_per_token


@dataclass(frozen=True)
class MemoryPlan:
    phases: tuple[Phase, ...]
    cache: CachePlan | None
    host_items: Mapping[str, float]  # bytes of pinned memory of the CPU

    def peak_bytes(self, name: str) -> float:
        return next((phase.peak_bytes for phase in self.phases if phase.name == name), 0.0)


def plan_memory(rank: RankMemory, workload: Workload, gpu: Gpu) -> MemoryPlan:
    sampler = rank.sampler
    cache = _cache(sampler, workload, gpu)
    kept_cache: dict[str, float] = {}
    if cache is not None and cache.is_kept and sampler is rank:
        kept_cache = {**rank.fp8_weights(), "KV cache": cache.num_bytes}
    phases = []
    # Ranks that share layers or rows train on one shard of the data.
    shares = rank.settings.layer_shares * rank.settings.row_shares
    trained = replace(workload, num_groups=shares * workload.num_groups)
    if cache is not None:
        phases.append(Phase(SAMPLING, {**sampler.while_sampling(), "KV cache": cache.num_bytes}))
    if workload.num_scorings:
        phases.append(_scoring(rank, trained, kept_cache))
    _, count = trained.passes(trained.train, rank.shape.window)
    row = trained.largest_pass(trained.train, rank.shape.window)
    phases.append(rank.training_phase(row, kept_cache, accumulates=count > trained.num_updates))
    phases.append(rank.optimizer_phase(kept_cache))
    return MemoryPlan(tuple(phases), cache, rank.in_host_memory())


def _cache(rank: RankMemory, workload: Workload, gpu: Gpu) -> CachePlan | None:
    engine = rank.settings.engine
    if engine is None or not workload.num_sampled:
        return None
    per_token = round(rank.cache_bytes_per_token())
    page = engine.page_size * per_token
    wanted, least = cache_pages(workload, engine.page_size, engine.rows)
    if engine.kv_cache_gib is not None:
        budget = engine.kv_cache_gib * GIB
    else:
        used = sum(rank.while_sampling().values()) + RUNTIME_BYTES
        budget = engine.utilization * gpu.memory_bytes - used
    pages = min(wanted, max(int(budget // page), 0))
    held = (pages + 1) * page  # one is the scratch page for padding
    is_small = held + sum(rank.fp8_weights().values()) <= KEPT_CACHE_SHARE * gpu.memory_bytes
    return CachePlan(per_token, (wanted + 1) * page, held, least * page, is_small or not rank.settings.trains)


def _scoring(rank: RankMemory, workload: Workload, kept_cache: Mapping[str, float]) -> Phase:
    row = workload.largest_pass(workload.score, rank.shape.window)
    head, layer = rank.layer.head_forward(row), rank.layer.layer_forward(row)
    items = {**rank.resident(), **rank.gathered_weights(), **kept_cache, **rank.quantised_weights(gradients=False)}
    # The layers are done when the head begins: the larger of the two counts.
    if head > layer:
        return Phase(SCORING, {**items, "logits chunk": head, "activations": rank.hidden_bytes(row.responses)})
    return Phase(SCORING, {**items, "activations": layer})


def cache_pages(workload: Workload, page_size: int, rows: int) -> tuple[int, int]:
    """Pages with which no sample waits, and those of one sequence (engines/native/engine.py)."""
    prompt = max(round(workload.lengths.prompt), 1)
    new = min(workload.max_new_tokens, workload.max_total_tokens - prompt)
    whole, shared = _pages(prompt + new, page_size), prompt // page_size
    total, slots, groups = 0, rows, math.ceil(workload.num_in_flight)  # of the rank with most of them
    while slots > 0 and groups > 0:
        together = min(workload.num_sampled, slots)
        total += _pages(prompt, page_size) + together * (whole - shared + 1)
        slots, groups = slots - together, groups - 1
    return max(total + 1, whole + 1), whole + 1


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
