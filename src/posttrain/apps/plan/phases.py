"""Peak memory of each phase of a step, and the size of the KV cache, on top of the estimate of one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from posttrain.apps.plan.calibration import Gpu
from posttrain.apps.plan.workload import Workload
from posttrain.policy.memory.peak_memory import (
    GIB,
    KEPT_CACHE_SHARE,
    RUNTIME_BYTES,
    SAMPLING,
    SCORING,
    Phase,
    RankMemory,
)

_PROMPT_SLOTS = 8  # engines/native/recurrent_states.py: NUM_PROMPT_SLOTS


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a sampling call."""

    bytes_per_token: int
    wanted_bytes: float  # with which no sample waits for pages
    num_bytes: float  # available
    least_bytes: float  # of one sequence
    is_kept: bool  # while training
    state_bytes: float = 0.0  # of recurrent layers, beside the cache
    max_rows: int | None = None  # sequences whose states fit; None: all

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
        kept_cache = {**rank.fp8_weights(), "KV cache": cache.num_bytes, **_states(cache)}
    phases = []
    # Ranks that share layers or rows train on one shard of the data.
    shares = rank.settings.layer_shares * rank.settings.row_shares
    trained = replace(workload, num_groups=shares * workload.num_groups)
    if cache is not None:
        items = sampler.while_sampling()
        items["working memory"] = max(items["working memory"], sampler.tower_bytes(workload.lengths.prompt))
        phases.append(Phase(SAMPLING, {**items, "KV cache": cache.num_bytes, **_states(cache)}))
    if workload.num_scorings:
        phases.append(scoring_phase(rank, trained, kept_cache))
    _, count = trained.passes(trained.train, rank.shape.window)
    row = trained.largest_pass(trained.train, rank.shape.window)
    phases.append(rank.training_phase(row, kept_cache, accumulates=count > trained.num_updates))
    phases.append(rank.optimizer_phase(kept_cache))
    return MemoryPlan(tuple(phases), cache, rank.in_host_memory())


def _states(cache: CachePlan) -> dict[str, float]:
    return {"recurrent states": cache.state_bytes} if cache.state_bytes else {}


def _cache(rank: RankMemory, workload: Workload, gpu: Gpu) -> CachePlan | None:
    engine = rank.settings.engine
    if engine is None or not workload.num_sampled:
        return None
    per_token = max(round(rank.cache_bytes_per_token()), 1)
    page = engine.page_size * per_token
    wanted, least = cache_pages(workload, engine.page_size, engine.rows)
    usable = engine.utilization * gpu.memory_bytes - sum(rank.while_sampling().values()) - RUNTIME_BYTES
    states, max_rows = 0.0, None
    if one := rank.state_bytes_of(0):
        # Those of a batch, and of prompts whose samples have not all started; at most half of the memory.
        slots = min(engine.rows + _PROMPT_SLOTS, max(int(usable / 2 / one), 0))
        states, max_rows = rank.state_bytes_of(slots), max(slots - _PROMPT_SLOTS, 0)
    budget = usable - states if engine.kv_cache_gib is None else engine.kv_cache_gib * GIB
    pages = min(wanted, max(int(budget // page), 0))
    held = (pages + 1) * page  # one is the scratch page for padding
    is_small = held + states + sum(rank.fp8_weights().values()) <= KEPT_CACHE_SHARE * gpu.memory_bytes
    is_kept = is_small or not rank.settings.trains
    return CachePlan(per_token, (wanted + 1) * page, held, least * page, is_kept, states, max_rows)


def scoring_phase(rank: RankMemory, workload: Workload, kept_cache: Mapping[str, float]) -> Phase:
    row = workload.largest_pass(workload.score, rank.shape.window)
    head, layer = rank.layer.head_forward(row), rank.layer.layer_forward(row)
    layer = max(layer, rank.tower_bytes(workload.lengths.prompt))
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
