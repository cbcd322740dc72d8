"""What a GPU holds at its highest while sampling, scoring, training and stepping the optimizer, item by item.

Sums are of tensors, as `torch.cuda.max_memory_allocated` counts them. What lies beside (the CUDA context, gaps between
blocks) is added only where it is asked whether all of it fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.planning.calibration import GIB, Calibration, Gpu
from posttrain.planning.layer_bytes import FP32, LayerBytes
from posttrain.planning.settings import OptimizerSettings, RunSettings
from posttrain.planning.shape import ModelShape, TensorKind
from posttrain.planning.workload import Pass, Workload

SAMPLING, SCORING, TRAINING, OPTIMIZER = "sampling", "logprobs", "training", "optimizer"
PHASES = (SAMPLING, SCORING, TRAINING, OPTIMIZER)
KEPT_CACHE_SHARE = 0.1  # of a GPU's memory: a KV cache up to this size stays while training, a larger one is given up
_SLICE = 2**23  # policy/optimizer/compact_adam.py: numbers that the compact optimizer works on at a time
_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Phase:
    name: str
    items: Mapping[str, float]  # bytes

    @property
    def peak_bytes(self) -> float:
        return sum(self.items.values())


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a sampling call."""

    bytes_per_token: int
    wanted_bytes: float  # with which nobody ever waits
    num_bytes: float  # what it gets
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


@dataclass(frozen=True)
class MemoryModel:
    shape: ModelShape
    settings: RunSettings
    gpu: Gpu
    calibration: Calibration
    layer: LayerBytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", LayerBytes(self.shape, self.settings, self.calibration))

    # -- what is there all the time ------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[TensorKind]:
        rank = self.settings.lora_rank
        return self.shape.tensors if rank is None else self.shape.adapters(rank)

    @property
    def num_trained(self) -> int:
        return sum(kind.num_weights for kind in self.trained)

    @property
    def weights(self) -> float:
        """Of one whole copy of the model."""
        return self.settings.element * self.shape.num_weights

    def resident(self) -> dict[str, float]:
        """Between steps, on one rank: sharded over all of them."""
        s, ranks = self.settings, self.settings.ranks
        adapters = s.element * self.num_trained if s.lora_rank is not None else 0
        items = {"weights": (self.weights + adapters) / ranks}
        if s.holds_copy:
            items["reference"] = self.weights / ranks
        if not s.optimizer.is_offloaded:
            items["optimizer state"] = self.state_bytes() / ranks
        return items

    def state_bytes(self) -> float:
        return sum(state_bytes(kind, self.settings.optimizer, self.settings.element) for kind in self.trained)

    def gradients(self) -> float:
        """Added up in fp32, whatever the weights are in."""
        return FP32 * self.num_trained / self.settings.ranks

    def gathered_weights(self) -> dict[str, float]:
        """FSDP: what is whole while layers run, the tables and two layers."""
        if self.settings.ranks == 1:
            return {}
        tables = (1 if self.shape.tied else 2) * self.shape.head_products
        return {"gathered layers": self.settings.element * (tables + 2 * self.shape.layer_products / self.shape.layers)}

    # -- phases --------------------------------------------------------------------------------------------------------

    def plan(self, workload: Workload) -> MemoryPlan:
        cache = self._cache(workload)
        kept_cache = {"KV cache": cache.num_bytes} if cache is not None and cache.is_kept else {}
        phases = []
        if cache is not None:
            phases.append(Phase(SAMPLING, {**self._while_sampling(), "KV cache": cache.num_bytes}))
        if workload.num_scorings:
            phases.append(self._scoring(workload, kept_cache))
        phases += [self._training(workload, kept_cache), self._optimizer(kept_cache)]
        return MemoryPlan(tuple(phases), cache, self._in_host_memory())

    def _in_host_memory(self) -> dict[str, float]:
        """Of the first rank, which has all the weights in its copy of a checkpoint."""
        state = self.state_bytes() / self.settings.ranks
        items = {"optimizer state": state} if self.settings.optimizer.is_offloaded else {}
        if (copy := self.settings.checkpoint_copy) != "none":
            weights = self.settings.element * self.num_trained
            items["copy of a checkpoint"] = weights + (state if copy == "with optimizer" else 0)
        return items

    def _while_sampling(self) -> dict[str, float]:
        """All but the cache. The working memory is what the engine itself sets aside (engines/native/forward.py)."""
        engine, s = self.settings.engine, self.shape
        assert engine is not None
        per_token = 4 * s.hidden * FP32 + 4 * max(s.inner, s.hidden) * self.settings.element
        working = engine.max_prefill_tokens * per_token + 3 * engine.rows * s.vocab * FP32
        whole = {"whole weights": self.weights} if self.settings.ranks > 1 else {}
        return {**self.resident(), **whole, "working memory": working}

    def _cache(self, workload: Workload) -> CachePlan | None:
        engine = self.settings.engine
        if engine is None or not workload.num_sampled:
            return None
        per_token = self.shape.layers * 2 * self.shape.kv_width * self.settings.element
        page = engine.page_size * per_token
        wanted, least = cache_pages(workload, engine.page_size, engine.rows)
        if engine.kv_cache_gib is not None:
            budget = engine.kv_cache_gib * GIB
        else:
            used = sum(self._while_sampling().values()) + self.calibration.runtime_bytes
            budget = engine.utilization * self.gpu.memory_bytes - used
        pages = min(wanted, max(int(budget // page), 0))
        held = (pages + 1) * page  # one page belongs to nobody
        is_kept = held <= KEPT_CACHE_SHARE * self.gpu.memory_bytes
        return CachePlan(per_token, (wanted + 1) * page, held, least * page, is_kept)

    def _scoring(self, workload: Workload, kept_cache: Mapping[str, float]) -> Phase:
        row = workload.largest_pass(workload.score, self.shape.window)
        head, layer = self.layer.head_forward(row), self.layer.layer_forward(row)
        items = {**self.resident(), **self.gathered_weights(), **kept_cache}
        # The layers are done when the head begins: the larger of the two counts.
        if head > layer:
            return Phase(SCORING, {**items, "logits chunk": head, "activations": self._hidden(row.responses)})
        return Phase(SCORING, {**items, "activations": layer})

    def _hidden(self, tokens: float) -> float:
        return self.settings.element * self.shape.hidden * tokens

    def _training(self, workload: Workload, kept_cache: Mapping[str, float]) -> Phase:
        _, count = workload.passes(workload.train, self.shape.window)
        row = workload.largest_pass(workload.train, self.shape.window)
        return self.training_phase(row, kept_cache, accumulates=count > workload.num_updates)

    def training_phase(self, row: Pass, kept_cache: Mapping[str, float], *, accumulates: bool) -> Phase:
        """A forward and backward pass. `accumulates`: after the first of an update all gradients are there from the start."""
        items = {**self.resident(), **self.gathered_weights(), **kept_cache}
        before = self.gradients() if accumulates else 0.0
        kept = self.layer.kept(row)
        one_layer = 0.0 if self.settings.checkpointing else self.layer.kept_by_layer(row)  # else counted as a moment
        moments: list[dict[str, float]] = [
            {
                "gradients": before,
                "activations": kept,
                "logits chunk": self.layer.head_backward(row, accumulates=accumulates),
            },
            {"gradients": before or self._head_gradient(), "activations": kept + self.layer.layer_backward(row)},
            {
                "gradients": self.gradients() + self._largest_gradient(),
                "activations": one_layer + self.layer.layer_backward(row),
            },
        ]
        highest = max(moments, key=lambda moment: sum(moment.values()))
        return Phase(TRAINING, {**items, **highest})

    def _head_gradient(self) -> float:
        """The first that is there."""
        trained = self.settings.lora_rank is None and not self.settings.scores_answers
        return FP32 * self.shape.head_products / self.settings.ranks if trained else 0.0

    def _largest_gradient(self) -> float:
        """Of one tensor, in the weights' precision, on its way into the fp32 sum."""
        return self.settings.element * max(kind.rows * (kind.columns or 1) for kind in self.trained)

    def _optimizer(self, kept_cache: Mapping[str, float]) -> Phase:
        optimizer, ranks = self.settings.optimizer, self.settings.ranks
        largest = FP32 * max(kind.rows * (kind.columns or 1) for kind in self.trained) / ranks
        moment = {
            "foreach": FP32 * self.num_trained / ranks,  # the root of the second moments, of all weights at once
            "single": 2 * largest,
            "fused": largest,  # squares of one gradient, for the norm
            "compact": max(largest, FP32 * 4 * _SLICE),
        }[optimizer.kind]
        if optimizer.is_offloaded:
            moment += 3 * _SLICE * self.state_bytes() / self.num_trained  # on their way in, at work, on their way out
        items = {**self.resident(), **kept_cache, "gradients": self.gradients(), "optimizer's work": moment}
        return Phase(OPTIMIZER, items)

    def needed_bytes(self, peak: float) -> float:
        """What a GPU must have for tensors of `peak` bytes."""
        return peak * (1 + self.calibration.allocator_slack) + self.calibration.runtime_bytes


def state_bytes(kind: TensorKind, optimizer: OptimizerSettings, element: int) -> float:
    """Masters and moments of some weights (policy/optimizer/compact_adam.py: new_state; mixed_precision.py)."""
    masters = FP32 if optimizer.has_masters and element != FP32 else 0
    block = block_size(kind.columns) if optimizer.state_dtype == "int8" and kind.columns is not None else None
    if block is not None:
        moment = 1 + FP32 / block
    else:
        moment = _STATE_BYTES.get(optimizer.state_dtype, FP32)
    return kind.num_weights * (masters + optimizer.num_moments * moment)


def block_size(columns: int) -> int | None:
    """Numbers that share a scale, as policy/optimizer/low_precision.py chooses it."""
    if columns < 16:
        return columns
    return next((size for size in range(min(columns, 256), 15, -1) if columns % size == 0), None)


def cache_pages(workload: Workload, page_size: int, rows: int) -> tuple[int, int]:
    """Pages with which no sample waits, and those of one sequence (engines/native/engine.py)."""
    prompt = max(round(workload.lengths.prompt), 1)
    new = min(workload.max_new_tokens, workload.max_total_tokens - prompt)
    whole, shared = _pages(prompt + new, page_size), prompt // page_size
    total, slots, groups = 0, rows, math.ceil(workload.num_groups)  # of the rank with most of them
    while slots > 0 and groups > 0:
        together = min(workload.num_sampled, slots)
        total += _pages(prompt, page_size) + together * (whole - shared + 1)
        slots, groups = slots - together, groups - 1
    return max(total + 1, whole + 1), whole + 1


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
