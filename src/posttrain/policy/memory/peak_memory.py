"""Peak GPU memory of one rank while sampling, training and stepping the optimizer, item by item.

Sums are of tensors, as `torch.cuda.max_memory_allocated` counts them. The CUDA context and gaps between blocks are
added only where the question is whether all of it fits.

`should_checkpoint` answers `policy.dtensor_cfg.activation_checkpointing: auto`. Each rank calls it once the model is
loaded. The answer affects memory and time, but not results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config.policy import PolicyConfig
from posttrain.files.json_files import JsonMapping
from posttrain.policy.memory.layer_bytes import FP32, LayerBytes, Pass
from posttrain.policy.memory.model_shape import ModelShape, TensorKind, UnknownModelError, known_shape, shape_of_config
from posttrain.policy.memory.settings import OptimizerSettings, RunSettings, run_settings

GIB = 2**30
SAMPLING, SCORING, TRAINING, OPTIMIZER = "sampling", "logprobs", "training", "optimizer"
FEATURE_BYTES = 2**30  # models/vision.py: features of images that a frozen tower made, in host memory, at most
KEPT_CACHE_SHARE = 0.1  # of a GPU's memory: a KV cache up to this size stays while training, a larger one is released
BUCKET_BYTES = 1 << 30  # through which a rank hands weights to engines on other GPUs, at most
RUNTIME_BYTES = 1 * GIB  # CUDA context and libraries: outside of what torch counts; estimate
ALLOCATOR_SLACK = 0.03  # of what is allocated, lost between blocks; estimate
_HEADROOM = 0.05  # fraction of memory: safety margin of the estimate
_COPIES_OF_KEYS = 2.0  # keys that attention is given for each token, where answers share their prompt
_SLICE = 2**23  # policy/optimizer/compact_adam.py: numbers that the compact optimizer works on at a time
_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Phase:
    name: str
    items: Mapping[str, float]  # bytes

    @property
    def peak_bytes(self) -> float:
        return sum(self.items.values())

    @property
    def needed_bytes(self) -> float:
        """Of the GPU: tensors, gaps between them, and the CUDA context."""
        return self.peak_bytes * (1 + ALLOCATOR_SLACK) + RUNTIME_BYTES


@dataclass(frozen=True)
class RankMemory:
    """Of one rank, on the GPU, item by item."""

    shape: ModelShape
    settings: RunSettings
    layer: LayerBytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", LayerBytes(self.shape, self.settings))

    # -- resident ------------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[TensorKind]:
        rank, on_tower = self.settings.lora_rank, self.settings.trains_tower
        if rank is not None:
            return self.shape.adapters(rank, on_tower=on_tower)
        return self.shape.tensors + list(self.shape.tower.tensors if on_tower else ())

    @property
    def num_trained(self) -> int:
        return sum(kind.num_weights for kind in self.trained)

    @property
    def weights(self) -> float:
        """Of one full copy of the model."""
        return self.settings.element * (self.shape.num_weights + self.shape.tower.num_weights)

    @property
    def is_sharded(self) -> bool:
        """By FSDP, for training."""
        return (self.settings.ranks > 1 or self.settings.in_host_memory) and self.settings.trains

    @property
    def own_experts(self) -> float:
        """Bytes of this rank's share of all layers' experts, whole."""
        counted = self.shape.counted
        return 0.0 if counted is None else self.settings.element * counted.expert_weights / self.settings.expert_shares

    @property
    def captures_graphs(self) -> bool:
        """Whether decode steps are CUDA graphs; not where ranks that train share layers (engines/native/engine.py)."""
        engine = self.settings.engine
        shares_layers = self.is_sharded and max(self.settings.layer_shares, self.settings.expert_shares) > 1
        return not shares_layers or (engine is not None and engine.has_own_weights)

    def _beside(self, shape: ModelShape | None, **settings: Any) -> RankMemory | None:
        """Another model on the ranks that train, which does not sample."""
        alone: dict[str, Any] = {"critic": None, "teacher": None, "engine": None, "num_engines": 0, **settings}
        alone["trains_tower"] = False
        return None if shape is None else RankMemory(shape, replace(self.settings, has_reference=False, **alone))

    @property
    def critic(self) -> RankMemory | None:
        return self._beside(self.settings.critic, scores_answers=True)

    @property
    def teacher(self) -> RankMemory | None:
        return self._beside(self.settings.teacher, lora_rank=None, expert_shares=1, fp8=False, checkpointing=False)

    def resident(self) -> dict[str, float]:
        """Between steps, on one rank; sharded over all ranks."""
        s, ranks = self.settings, self.settings.ranks
        adapters = s.element * self.num_trained if s.lora_rank is not None else 0
        items = {"weights": (self.weights + adapters) / ranks}
        if not s.trains:
            return items
        if s.in_host_memory:
            return {}
        if s.holds_copy:
            items["reference"] = self.weights / ranks
        if not s.optimizer.is_offloaded:
            items["optimizer state"] = self.state_bytes() / ranks
        if self.critic is not None:
            items["critic"] = sum(self.critic.resident().values())
        if self.teacher is not None:
            items["teacher"] = self.teacher.weights / ranks
        if s.num_engines:
            items["bucket for engines"] = min(BUCKET_BYTES, (adapters or self.weights) / ranks)
        return items

    def state_bytes(self) -> float:
        return sum(state_bytes(kind, self.settings.optimizer, self.settings.element) for kind in self.trained)

    def gradients(self) -> float:
        """Accumulated in fp32, whatever the precision of the weights."""
        return FP32 * self.num_trained / self.settings.ranks

    def gathered_weights(self) -> dict[str, float]:
        """FSDP: gathered while layers run: the embeddings and two layers."""
        if not self.is_sharded:
            return {}
        tables = (1 if self.shape.tied else 2) * self.shape.head_products
        if self.teacher is not None:  # those of its root stay whole after its pass
            tables += (1 if self.teacher.shape.tied else 2) * self.teacher.shape.head_products
        shares = self.settings.expert_shares * self.settings.layer_shares
        is_gathered = self.settings.ranks > shares or self.settings.in_host_memory
        experts = self.own_experts if is_gathered else 0.0
        layers = self.settings.element * self.shape.layer_weights - self.settings.expert_shares * self.own_experts
        gathered = self.settings.element * (tables + self.shape.tower.num_weights) + 2 * layers / self.shape.layers
        return {"gathered layers": gathered / self.settings.layer_shares + 2 * experts / self.shape.layers}

    @property
    def sampler(self) -> RankMemory:
        """What samples: this rank, or a GPU of an engine, which holds its part of the layers and nothing else."""
        if not self.settings.num_engines:
            return self
        size = self.settings.engine_shares
        return RankMemory(
            self.shape,
            replace(
                self.settings, ranks=size, layer_shares=size, row_shares=1, expert_shares=1, num_engines=0, trains=False
            ),
        )

    # -- phases --------------------------------------------------------------------------------------------------------

    def in_host_memory(self) -> dict[str, float]:
        """Of rank 0, whose copy of a checkpoint holds all weights."""
        state = self.state_bytes() / self.settings.ranks
        items = {"optimizer state": state} if self.settings.optimizer.is_offloaded else {}
        if self.settings.in_host_memory:
            items |= {"weights": self.weights / self.settings.ranks, "gradients": self.gradients()}
            if self.settings.holds_copy:
                items["reference"] = self.weights / self.settings.ranks
            if self.teacher is not None:
                items["teacher"] = self.teacher.weights / self.settings.ranks
        if (copy := self.settings.checkpoint_copy) != "none":
            weights = self.settings.element * self.num_trained
            items["copy of a checkpoint"] = weights + (state if copy == "with optimizer" else 0)
        if self.shape.tower.patches_per_token and not self.settings.trains_tower:
            items["features of images"] = FEATURE_BYTES
        critic = {} if self.critic is None else self.critic.in_host_memory()
        return {name: size + critic.get(name, 0.0) for name, size in items.items()}

    def while_sampling(self) -> dict[str, float]:
        """Everything but the cache. The working memory is what the engine reserves (engines/native/forward.py)."""
        engine, s = self.settings.engine, self.shape
        assert engine is not None
        per_token = 4 * s.hidden * FP32 + 4 * max(s.inner, s.hidden) * self.settings.element
        working = engine.max_prefill_tokens * per_token + 3 * engine.most_rows * s.vocab * FP32
        dense = (self.weights - self.settings.expert_shares * self.own_experts) / self.settings.layer_shares
        whole = {"whole weights": dense + self.own_experts} if self.is_sharded else {}
        if engine.has_own_weights:
            # On several GPUs that only sample, vLLM's parts are the only ones.
            alone = not self.settings.trains and self.settings.ranks > 1
            whole = {} if alone else {"weights of vLLM": self.weights}
        return {**self.resident(), **whole, **self.fp8_weights(), "working memory": working}

    def fp8_weights(self) -> dict[str, float]:
        """Of a sampler in FP8: copies of the layers' weights (policy/fused/fp8.py)."""
        engine = self.settings.engine
        if engine is None or not engine.in_fp8:
            return {}
        return {"FP8 weights": engine.fp8_share(self.shape.layers) * self.shape.layer_weights}

    def quantised_weights(self, *, gradients: bool) -> dict[str, float]:
        """Of a pass in FP8 (`policy.fp8`): copies of the layers' weights, for gradients along the other axis too."""
        if not self.settings.fp8:
            return {}
        return {"FP8 weights of training": (2.0 if gradients else 1.0) * self.shape.layer_weights}

    def cache_bytes_per_token(self) -> float:
        engine, s = self.settings.engine, self.shape
        assert engine is not None
        quantised = engine.fp8_share(s.layers) if engine.cache_in_fp8 else 0.0
        # Of latent vectors 16 bits only: engines/native/fp8.py.
        cached = 2 * s.layers * s.kv_width if s.keeps_latents and self.settings.element > 2 else s.cached
        plain = cached * self.settings.element
        in_fp8 = cached + 2 * s.layers * FP32 * s.kv_heads  # and a factor for each head
        return (1 - quantised) * plain + quantised * in_fp8

    def state_bytes_of(self, num_slots: float) -> float:
        """Recurrent states of sequences and prompts, and a slot for padding (engines/native/recurrent_states.py)."""
        state = self.shape.state_bytes(self.settings.element) / self.settings.layer_shares
        return state * (num_slots + 1) if state else 0.0

    def tower_bytes(self, tokens: float) -> float:
        """While the tower computes one image; done before the layers begin."""
        return self.settings.element * self.shape.tower.live_numbers(tokens)

    def hidden_bytes(self, tokens: float) -> float:
        return self.settings.element * self.shape.hidden * tokens

    def training_phase(self, row: Pass, kept_cache: Mapping[str, float], *, accumulates: bool) -> Phase:
        """A forward and backward pass, of the policy or the critic, whichever needs more. `accumulates`: gradients of
        earlier passes of the update exist already."""
        held = {**self.resident(), **kept_cache}
        phases = [one._pass(row, held, accumulates) for one in (self, self.critic) if one is not None]
        return max(phases, key=lambda phase: phase.peak_bytes)

    def _pass(self, row: Pass, held: Mapping[str, float], accumulates: bool) -> Phase:
        items = {**held, **self.gathered_weights(), **self.quantised_weights(gradients=True)}
        before = self.gradients() if accumulates else 0.0
        is_head_trained = self.settings.lora_rank is None and not self.settings.scores_answers
        head = FP32 * self.shape.head_products / self.settings.ranks if is_head_trained else 0.0  # the first gradient
        # Of one tensor, in the precision of the weights, before it is added to the fp32 sum.
        largest = max(kind.rows * (kind.columns or 1) for kind in self.trained)
        largest_gradient = self.settings.element * largest / self.settings.layer_shares
        kept = self.layer.kept(row)
        if self.settings.trains_tower:  # the last of the backward pass
            items["activations of the tower"] = self.settings.element * self.shape.tower.kept_numbers(row.prompts)
        one_layer = 0.0 if self.settings.checkpointing else self.layer.kept_by_layer(row)  # else counted as temporary
        peaks: list[dict[str, float]] = [
            {
                "gradients": before,
                "activations": kept,
                "logits chunk": self.layer.head_backward(row, accumulates=accumulates),
            },
            {"gradients": before or head, "activations": kept + self.layer.layer_backward(row)},
            {
                "gradients": self.gradients() + largest_gradient,
                "activations": one_layer + self.layer.layer_backward(row),
            },
        ]
        if self.settings.in_host_memory:
            peaks = self._peaks_of_passing_gradients(row)
        if (teacher := self.teacher) is not None:
            states = teacher.hidden_bytes(row.responses)  # until the divergence is differentiated
            peaks[0] |= {"logits chunk": self.layer.compared(row, teacher.shape), "states of the teacher": states}
            own = sum(teacher.gathered_weights().values())
            peaks.append({"gradients": before, "activations": own + teacher.layer.layer_forward(row)})
        highest = max(peaks, key=lambda peak: sum(peak.values()))
        return Phase(TRAINING, {**items, **highest})

    def _peaks_of_passing_gradients(self, row: Pass) -> list[dict[str, float]]:
        """Gradients that go to host memory: of two layers at a time, of the root's tables at the end. FSDP reduces them
        in fp32; that of the output head waits for the embedding's.
        """
        element, ranks, layers = self.settings.element, self.settings.ranks, self.shape.layers
        is_whole = self.settings.lora_rank is None
        head = element * self.shape.head_products if is_whole and not self.settings.scores_answers else 0.0
        tables = (1 if self.shape.tied else 2) * self.shape.head_products if is_whole else 0.0
        tables += self.shape.tower.num_weights if is_whole and self.settings.trains_tower else 0.0
        of_layer = (self.shape.layer_weights if is_whole else self.num_trained) / layers / self.settings.layer_shares
        reduced = element + FP32 + FP32 / ranks
        kept = self.layer.kept(row)
        return [
            {"gradients": head, "activations": kept, "logits chunk": self.layer.head_backward(row, accumulates=False)},
            {"gradients": head + 2 * reduced * of_layer, "activations": kept + self.layer.layer_backward(row)},
            {"gradients": reduced * tables / self.settings.layer_shares},
        ]

    def optimizer_phase(self, kept_cache: Mapping[str, float]) -> Phase:
        held = {**self.resident(), **kept_cache}
        phases = [one._update(held) for one in (self, self.critic) if one is not None]
        return max(phases, key=lambda phase: phase.peak_bytes)

    def _update(self, held: Mapping[str, float]) -> Phase:
        optimizer, ranks = self.settings.optimizer, self.settings.ranks
        largest = FP32 * max(kind.rows * (kind.columns or 1) for kind in self.trained) / ranks
        work = {
            "foreach": FP32 * self.num_trained / ranks,  # the root of the second moments, of all weights at once
            "single": 2 * largest,
            "fused": largest,  # squares of one gradient, for the norm
            "compact": max(largest, FP32 * 4 * _SLICE),
        }[optimizer.kind]
        if optimizer.is_offloaded:
            # Slices being copied in, updated, and copied out.
            work += 3 * _SLICE * self.state_bytes() / self.num_trained
        if self.settings.in_host_memory:  # weights and gradients too, and the norm is computed there
            work += 3 * _SLICE * (self.settings.element + FP32) - max(0.0, largest - FP32 * 4 * _SLICE)
        gradients = 0.0 if self.settings.in_host_memory else self.gradients()
        return Phase(OPTIMIZER, {**held, "gradients": gradients, "optimizer's work": work})


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
    """Numbers that share a scale, as in policy/optimizer/low_precision.py."""
    if columns < 16:
        return columns
    return next((size for size in range(min(columns, 256), 15, -1) if columns % size == 0), None)


def should_checkpoint(
    model_config: JsonMapping,
    policy: PolicyConfig,
    *,
    memory_bytes: int,
    has_reference: bool,
    ranks: int,
    scores_answers: bool = False,
    teacher: JsonMapping | None = None,
) -> bool:
    """True if activations would not fit, or if a model is not supported by the estimate. `teacher`: its config."""
    try:
        find = known_shape if model_config.get("vision_config") else shape_of_config
        shape = find(policy.model_name, model_config)
        other = None if teacher is None else shape_of_config("teacher.model_name", teacher)
    except UnknownModelError:
        return True
    if scores_answers:
        shape = shape.without_output_table()
    settings = run_settings(
        policy,
        has_reference=has_reference,
        ranks=ranks,
        scores_answers=scores_answers,
        checkpointing=False,
        teacher=other,
        compared_numbers=9,  # whatever the divergence is
    )
    memory = RankMemory(shape, settings)
    tokens = float(_largest_micro_batch(policy))
    row = Pass(tokens, tokens, _COPIES_OF_KEYS * tokens, 0.0, prompts=tokens)
    cache = {"KV cache": KEPT_CACHE_SHARE * memory_bytes} if settings.engine is not None else {}
    phase = memory.training_phase(row, cache, accumulates=True)
    return phase.needed_bytes > (1 - _HEADROOM) * memory_bytes


def _largest_micro_batch(policy: PolicyConfig) -> int:
    # A pair is two answers, which stay together whatever the budget. Without sampling, a sample may be a pair.
    per_sample = 1 if policy.generation is not None else 2
    longest = per_sample * policy.max_total_sequence_length
    for section in (policy.dynamic_batching, policy.sequence_packing):
        if section.enabled and section.train_mb_tokens:
            return max(section.train_mb_tokens, longest)
    return policy.train_micro_batch_size * longest
