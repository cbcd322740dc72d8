"""The settings of a run that decide its memory and time, as plain numbers that the planner varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from posttrain.config.policy import LoraConfig, OptimizerConfig, PolicyConfig
from posttrain.policy.memory.model_shape import ModelShape

AdamKind = Literal["foreach", "fused", "single", "compact"]
CheckpointCopy = Literal["none", "weights", "with optimizer"]  # in host memory, to be written in the background
# Rows of a decode step, drafts included: beyond that products are bound by computing, for models of every size.
MAX_DRAFTED_ROWS = 512
MOST_DRAFTED_SAMPLES = 128
_ALL_LINEARS = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def draft_length(size: int, wanted: int | None) -> int:
    """Tokens that the native engine may draft for each answer in a batch of `size`; `wanted` None: where that pays."""
    if size > MOST_DRAFTED_SAMPLES:
        return 0
    if wanted is None:
        wanted = 7 if size <= MAX_DRAFTED_ROWS // 8 else 3
    return min(wanted, MAX_DRAFTED_ROWS // size - 1)


@dataclass(frozen=True)
class OptimizerSettings:
    """How a run stores its optimizer state (policy/optimizer)."""

    kind: AdamKind = "foreach"
    num_moments: int = 2
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    has_masters: bool = True  # fp32 copies, where weights are in lower precision
    is_offloaded: bool = False

    @classmethod
    def of(cls, config: OptimizerConfig, *, in_host_memory: bool = False) -> OptimizerSettings:
        """`in_host_memory`: the parameters are there."""
        masters, is_offloaded = config.master_weights != "none", config.offload_states or in_host_memory
        is_plain = config.state_dtype == "float32" and masters and not is_offloaded
        kind: AdamKind = "foreach"
        if not is_plain:
            kind = "compact"
        elif config.kwargs.get("fused"):
            kind = "fused"
        elif config.kwargs.get("foreach") is False:
            kind = "single"
        moments = (1 if config.kwargs.get("momentum") else 0) if config.name.endswith(".SGD") else 2
        return cls(kind, moments, config.state_dtype, masters, is_offloaded)


@dataclass(frozen=True)
class EngineSettings:
    """Of the native engine (engines/native/engine.py)."""

    rows: int
    page_size: int
    max_prefill_tokens: int
    kv_cache_gib: float | None
    utilization: float  # of the GPU's memory, by everything, while sampling
    in_fp8: bool = False
    cache_in_fp8: bool = False
    layers_in_bf16: int = 0  # of a sampler in FP8
    num_drafts: int | None = 0  # tokens drafted for each answer; None: where that pays
    has_own_weights: bool = False  # vLLM: not the sharded ones of the trainer

    @property
    def most_rows(self) -> int:
        """Of one step."""
        return self.rows if self.num_drafts == 0 else max(self.rows, MAX_DRAFTED_ROWS)

    def fp8_share(self, num_layers: int) -> float:
        """Of the layers."""
        return max(0.0, 1 - self.layers_in_bf16 / num_layers) if self.in_fp8 else 0.0


@dataclass(frozen=True)
class RunSettings:
    element: int  # bytes of a weight: 2 or 4
    checkpointing: bool
    lora_rank: int | None
    optimizer: OptimizerSettings
    has_reference: bool  # a frozen copy of the model; with LoRA the base model is used
    chunk_tokens: int | None  # whose logits exist at the same time; None: chosen by vocabulary
    scores_answers: bool  # a reward model: no output head
    ranks: int  # that share weights and state
    engine: EngineSettings | None
    checkpoint_copy: CheckpointCopy = "none"
    layer_shares: int = 1  # ranks that share each layer
    splits_rows: bool = False  # those ranks have parts of the rows in between (sequence_parallel)
    row_shares: int = 1  # ranks that share each packed row in training
    expert_shares: int = 1  # ranks that share the experts of each layer
    num_engines: int = 0  # on GPUs that only sample; 0: those that train sample too
    engine_shares: int = 1  # GPUs that share the layers of such an engine
    trains: bool = True  # False: an engine on a GPU of its own
    fp8: bool = False  # products of training and of log-probabilities
    in_host_memory: bool = False  # parameters, gradients and state, between uses
    critic: ModelShape | None = None  # a second model, with its own optimizer
    teacher: ModelShape | None = None  # a frozen model, whose distributions are learned
    trains_tower: bool = False
    compared_numbers: int = 7  # in fp32, that live of each logit where policy and teacher are compared

    @property
    def holds_copy(self) -> bool:
        return self.has_reference and self.lora_rank is None


def run_settings(
    policy: PolicyConfig,
    *,
    has_reference: bool,
    ranks: int,
    scores_answers: bool = False,
    checkpointing: bool | None = None,
    **others: Any,
) -> RunSettings:
    """`ranks` are all that train. `checkpointing` is used if the config has auto; `others` are fields of the result."""
    engine = None
    if policy.generation is not None:
        native = policy.generation.native_cfg
        drafts: int | None = None if native.num_speculative_tokens == "auto" else native.num_speculative_tokens
        if drafts is None and policy.deterministic:
            drafts = 0  # whether they pay is found out by timing
        engine = EngineSettings(
            native.max_batch_size,
            native.page_size,
            native.max_prefill_tokens,
            native.kv_cache_gib,
            native.gpu_memory_utilization,
            in_fp8=native.precision == "fp8",
            cache_in_fp8=native.precision == "fp8" and native.kv_cache_dtype != "bfloat16",
            layers_in_bf16=native.num_first_layers_in_bf16 + native.num_last_layers_in_bf16,
            num_drafts=drafts if ranks == 1 else 0,
            has_own_weights=policy.generation.uses_vllm,
        )
    setting, lora = policy.dtensor_cfg.activation_checkpointing, policy.dtensor_cfg.lora_cfg
    return RunSettings(
        element=4 if policy.precision == "float32" else 2,
        checkpointing=bool(checkpointing) if setting == "auto" else bool(setting),
        lora_rank=lora.dim if lora.enabled else None,
        optimizer=OptimizerSettings.of(policy.optimizer, in_host_memory=policy.dtensor_cfg.cpu_offload),
        has_reference=has_reference,
        chunk_tokens=policy.logprob_chunk_size,
        scores_answers=scores_answers,
        ranks=ranks // (policy.dtensor_cfg.dp_replicate_size or 1),
        engine=engine,
        layer_shares=policy.dtensor_cfg.tensor_parallel_size,
        splits_rows=policy.dtensor_cfg.sequence_parallel,
        row_shares=policy.dtensor_cfg.context_parallel_size,
        expert_shares=policy.dtensor_cfg.expert_parallel_size or 1,
        fp8=policy.fp8,
        in_host_memory=policy.dtensor_cfg.cpu_offload,
        trains_tower=policy.vision.train_tower,
        **others,
    )


def counts_too_many_adapters(lora: LoraConfig) -> bool:
    """Whether some linear layers have no adapter: the planner counts one on each, an upper bound."""
    targets = {target.rpartition(".")[2] for target in lora.target_modules}
    is_whole = lora.match_all_linear or not targets or targets >= _ALL_LINEARS
    return lora.enabled and (bool(lora.exclude_modules) or not is_whole)
