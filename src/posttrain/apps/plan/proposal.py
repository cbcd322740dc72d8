"""Proposes faster settings (micro-batches, activation checkpointing, decode rows) and, where something does not fit,
the single changes that would make it fit.

Proposals do not change what is learnt, unless marked (adapters instead of all weights).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.measured import read_measured
from posttrain.apps.plan.plan import RunEstimate, estimate, estimate_run
from posttrain.apps.plan.workload import MicroBatch, Workload
from posttrain.config import RunConfig
from posttrain.errors import InputError, OutOfGpuMemoryError
from posttrain.files.text_templates import render_text
from posttrain.policy.memory.peak_memory import GIB, OPTIMIZER, SAMPLING, SCORING, TRAINING
from posttrain.policy.memory.settings import OptimizerSettings, RunSettings

_HEADROOM = 0.05  # of the GPU's memory, which a proposal leaves free
_AS_GOOD = 0.015  # a smaller setting is preferred to one that saves less time than this share
_WORTH_PROPOSING = 0.01  # of a step's time: for less, nothing is proposed
_LARGEST_BUDGET = 131072
_LEAST_UTILIZATION = 0.3  # of a GPU's memory, which sampling is left with
_ROWS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Proposal:
    """Settings by their config keys, and their estimate."""

    settings: dict[str, str]
    found: RunEstimate


@dataclass(frozen=True)
class Remedy:
    words: str  # the setting, as it is typed
    found: RunEstimate

    @property
    def is_enough(self) -> bool:
        return not self.found.too_large


def with_settings(
    found: RunEstimate, settings: RunSettings | None = None, workload: Workload | None = None
) -> RunEstimate:
    return estimate(found.shape, settings or found.settings, workload or found.workload, found.gpu)


def _has_room(found: RunEstimate, *phases: str) -> bool:
    limit = (1 - _HEADROOM) * found.gpu.memory_bytes
    return all(phase.needed_bytes <= limit for phase in found.memory.phases if phase.name in phases)


# -- better settings ---------------------------------------------------------------------------------------------------


def propose(found: RunEstimate) -> Proposal | None:
    """The fastest settings that fit with headroom: none if the current ones are as fast, None if nothing fits."""
    trained = _best_training(found)
    if trained is None:
        return None
    section = found.workload.budget_section
    names = {
        f"{section}.enabled": "true",
        f"{section}.train_mb_tokens": str(trained.workload.train.max_tokens),
        "policy.dtensor_cfg.activation_checkpointing": str(trained.settings.checkpointing).lower(),
    }
    best = trained
    if best.workload.num_scorings:
        best = _best_scoring(best)
        names[f"{section}.logprob_mb_tokens"] = str(best.workload.score.max_tokens)
    if best.memory.cache is not None:
        best = _best_rows(best)
        assert best.settings.engine is not None
        names["policy.generation.native_cfg.max_batch_size"] = str(best.settings.engine.rows)
    if not found.too_large and best.time.total_s >= found.time.total_s * (1 - _WORTH_PROPOSING):
        return Proposal({}, found)
    return Proposal(names, best)


def _budgets(workload: Workload) -> Iterator[int]:
    """From one sequence to all of an update, in steps of about a third."""
    whole = workload.num_groups / workload.num_updates * workload.bundle(MicroBatch(_LARGEST_BUDGET, 1)).cost
    budget = max(1024, -(-workload.max_total_tokens // 1024) * 1024)
    most = min(max(whole, budget), _LARGEST_BUDGET)
    while True:
        yield budget
        if budget >= most:
            return
        budget = -(-int(budget * 4 / 3) // 1024) * 1024


def _best_training(found: RunEstimate) -> RunEstimate | None:
    tried = [
        with_settings(
            found, replace(found.settings, checkpointing=recomputes), found.workload.with_train_tokens(budget)
        )
        for recomputes in (False, True)
        for budget in _budgets(found.workload)
    ]
    fitting = [one for one in tried if _has_room(one, TRAINING, OPTIMIZER)]
    return _smallest_as_good(fitting, [one.time.passes_s for one in fitting]) if fitting else None


def _best_scoring(found: RunEstimate) -> RunEstimate:
    tried = [
        with_settings(found, workload=replace(found.workload, score=replace(found.workload.score, max_tokens=budget)))
        for budget in _budgets(found.workload)
    ]
    fitting = [one for one in tried if _has_room(one, SCORING)] or tried[:1]
    return _smallest_as_good(fitting, [one.time.logprobs_s for one in fitting])


def _best_rows(found: RunEstimate) -> RunEstimate:
    engine = found.settings.engine
    assert engine is not None
    count = found.workload.num_groups * found.workload.num_sampled
    choices = [rows for rows in _ROWS if rows < count] + [max(1, min(round(count), _ROWS[-1]))]
    tried = [with_settings(found, replace(found.settings, engine=replace(engine, rows=rows))) for rows in choices]
    fitting = [one for one in tried if SAMPLING not in {phase.name for phase in one.too_large}] or tried[:1]
    return _smallest_as_good(fitting, [one.time.generation_s for one in fitting])


def _smallest_as_good(tried: list[RunEstimate], seconds: list[float]) -> RunEstimate:
    limit = min(seconds) * (1 + _AS_GOOD)
    return next(one for one, taken in zip(tried, seconds, strict=True) if taken <= limit)


# -- what does not fit -------------------------------------------------------------------------------------------------


def remedies(found: RunEstimate) -> list[Remedy]:
    """Single changes, sufficient ones first; if none is sufficient, changes that are applied one after another."""
    tried = _tried(found, {phase.name for phase in found.too_large})
    enough = [remedy for remedy in tried if remedy.is_enough]
    if enough or not tried:
        return enough
    words: list[str] = []
    current = found
    for _ in range(len(tried)):
        # The change that frees most of the excess.
        candidates = _tried(current, {phase.name for phase in current.too_large})
        better = [one for one in candidates if _excess(one.found) < _excess(current)]
        if not better:
            break
        best = min(better, key=lambda one: _excess(one.found))
        words, current = [*words, best.words], best.found
        if best.is_enough:
            break
    return [Remedy(" ".join(words), current)] if words else []


def savings(found: RunEstimate, phases: Collection[str]) -> list[tuple[str, float]]:
    """Single changes and the bytes that each frees in the peak of these phases, most first."""

    def peak(one: RunEstimate) -> float:
        return max((phase.needed_bytes for phase in one.memory.phases if phase.name in phases), default=0.0)

    freed = [(remedy.words, peak(found) - peak(remedy.found)) for remedy in _tried(found, phases)]
    return sorted((one for one in freed if one[1] > 0), key=lambda one: -one[1])


def _tried(found: RunEstimate, phases: Collection[str]) -> list[Remedy]:
    changes = _changes(found, phases)
    return [Remedy(words, with_settings(found, settings, workload)) for words, settings, workload in changes]


def _excess(found: RunEstimate) -> float:
    """Excess bytes over all phases."""
    missing = 0.0
    cache = found.memory.cache
    if cache is not None and cache.num_bytes < cache.least_bytes:
        missing += cache.least_bytes - cache.num_bytes
    return missing + sum(max(p.needed_bytes - found.gpu.memory_bytes, 0.0) for p in found.memory.phases)


def _changes(found: RunEstimate, phases: Collection[str]) -> Iterator[tuple[str, RunSettings | None, Workload | None]]:
    """Settings that need less memory in `phases`."""
    settings, workload, section = found.settings, found.workload, found.workload.budget_section
    if TRAINING in phases:
        if not settings.checkpointing:
            yield "policy.dtensor_cfg.activation_checkpointing=true", replace(settings, checkpointing=True), None
        least = next(_budgets(workload))
        if workload.train.max_tokens is None or workload.train.max_tokens > least:
            smaller = max((workload.train.max_tokens or 2 * least) // 2, least)
            words = f"{section}.enabled=true {section}.train_mb_tokens={smaller}"
            yield words, None, workload.with_train_tokens(smaller)
    if OPTIMIZER in phases and settings.optimizer.kind == "foreach":
        fused = replace(settings.optimizer, kind="fused")
        yield "policy.optimizer.kwargs.fused=true", replace(settings, optimizer=fused), None
    yield from _state_changes(settings)
    if SCORING in phases and (workload.score.max_tokens or 0) > next(_budgets(workload)):
        smaller = max((workload.score.max_tokens or 0) // 2, next(_budgets(workload)))
        score = replace(workload.score, max_tokens=smaller)
        yield f"{section}.logprob_mb_tokens={smaller}", None, replace(workload, score=score)
    if SAMPLING in phases and settings.engine is not None and settings.engine.rows > 8:
        rows = settings.engine.rows // 2
        engine = replace(settings.engine, rows=rows, kv_cache_gib=None)
        words = f"policy.generation.native_cfg.max_batch_size={rows}"
        if settings.engine.kv_cache_gib is not None:
            words += " policy.generation.native_cfg.kv_cache_gib=null"
        yield words, replace(settings, engine=engine), None
        if settings.engine.kv_cache_gib is None and settings.engine.utilization > _LEAST_UTILIZATION:
            share = round(settings.engine.utilization - 0.1, 2)
            words = f"policy.generation.native_cfg.gpu_memory_utilization={share}"
            yield words, replace(settings, engine=replace(settings.engine, utilization=share)), None


def _state_changes(settings: RunSettings) -> Iterator[tuple[str, RunSettings | None, Workload | None]]:
    """Smaller optimizer state, offloaded state, or state of fewer weights."""
    optimizer = settings.optimizer
    if settings.lora_rank is None and optimizer.num_moments == 2:
        for dtype in ("bfloat16", "int8"):
            shorter = OptimizerSettings("compact", 2, dtype, has_masters=False, is_offloaded=optimizer.is_offloaded)
            if optimizer != shorter and optimizer.state_dtype != "int8":
                words = f"policy.optimizer.state_dtype={dtype} policy.optimizer.master_weights=none"
                yield words, replace(settings, optimizer=shorter), None
        if not optimizer.is_offloaded:
            away = replace(optimizer, kind="compact", is_offloaded=True)
            yield "policy.optimizer.offload_states=true", replace(settings, optimizer=away), None
        if not settings.in_host_memory and settings.expert_shares == 1 and not settings.fp8:
            away = replace(optimizer, kind="compact", is_offloaded=True)
            yield "policy.dtensor_cfg.cpu_offload=true", replace(settings, optimizer=away, in_host_memory=True), None
    if settings.lora_rank is None:
        words = "policy.dtensor_cfg.lora_cfg.enabled=true (trains adapters instead of all weights)"
        yield words, replace(settings, lora_rank=8), None


def explain(found: RunEstimate) -> str:
    """What is too large, and the remedies; empty if everything fits."""
    if not found.too_large:
        return ""
    template = Path(__file__).with_name("too_large.txt")
    text = render_text(
        template, found=found, cache=found.memory.cache, SAMPLING=SAMPLING, GIB=GIB, tried=remedies(found)
    )
    return text.rstrip("\n")


# -- of a run that ran out of GPU memory -------------------------------------------------------------------------------

_PHASES = {
    "generate": (SAMPLING,),
    "sample_round": (SAMPLING,),
    "update": (TRAINING, OPTIMIZER),
    "logprobs": (SCORING,),
    "reference_logprobs": (SCORING,),
    "evaluate": (SCORING,),
}
_MOST_SHOWN = 4


def advice(config: RunConfig, error: OutOfGpuMemoryError, folder: Path) -> str:
    """The planner's estimate, and settings that free memory in the failed phase. Empty where the planner cannot count:
    an unknown model, or a GPU of unknown size.

    `folder` is the run's: the lengths that it has measured are used.
    """
    if not error.gpu_bytes:
        return ""
    like = min(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - error.gpu_bytes))
    try:
        lengths = read_measured(folder).lengths
    except InputError:
        lengths = None
    try:
        found = estimate_run(config, replace(like, memory_bytes=error.gpu_bytes), lengths=lengths)
    except InputError:
        return ""
    counted = ", ".join(f"{phase.name} {phase.needed_bytes / GIB:.1f}" for phase in found.memory.phases)
    lines = [f"the planner counts, in GiB of {error.gpu_bytes / GIB:.1f}: {counted}"]
    if found.too_large:
        return "\n".join([*lines, explain(found)])
    used = found.workload.lengths
    lines.append(
        "  by its count this fits. Other processes may hold memory of the GPU (`nvidia-smi`), or sequences are longer "
        f"than the prompts of {used.prompt:.0f} and answers of {used.answer:.0f} tokens that it takes ({used.source})"
    )
    for words, freed_bytes in savings(found, _PHASES.get(error.stage, (OPTIMIZER,)))[:_MOST_SHOWN]:
        lines.append(f"  try {words}: {freed_bytes / GIB:.1f} GiB less")
    return "\n".join(lines)
