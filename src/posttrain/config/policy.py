"""`policy` and `policy.generation`: the model that is trained, its optimizer, how the work is cut into pieces, and how
answers are sampled.

The native engine samples from the modules that are being trained; vLLM runs in a process of its own and gets the
weights. Settings of other engines are in `foreign/nemo_rl.yaml`, so that files written for them load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import (
    FreeMap,
    IsSetByUser,
    NonNegativeInt,
    OpenSection,
    PositiveFloat,
    PositiveInt,
    Section,
    setting,
)
from posttrain.config.placement import ResourcesConfig
from posttrain.files.json_files import JsonObject

TopK = Annotated[int, Field(ge=-1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]


# Arguments of `vllm.LLM` that a training run decides on, or reads from vllm_cfg: not to be given in vllm_kwargs.
ARGUMENTS_OF_VLLM_IN_USE = frozenset(
    {
        "model", "tokenizer", "load_format", "max_model_len", "logprobs_mode", "weight_transfer_config",
        "worker_extension_cls", "enable_sleep_mode", "enable_lora", "max_lora_rank", "max_loras",
        "tensor_parallel_size", "enable_return_routed_experts",
    }
)  # fmt: skip


class NativeConfig(Section):
    precision: Literal["auto", "fp8"] = setting(
        "auto",
        "Number format of the layers' products while sampling: auto is that of the weights; fp8 quantises copies of "
        "them after each update, a factor per output.",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = setting(
        "auto",
        "Number format of the key-value cache where precision is fp8: auto is fp8, bfloat16 that of the weights.",
    )
    num_first_layers_in_bf16: NonNegativeInt = setting(
        0, "Layers at the beginning that precision fp8 leaves as they are, their cache too."
    )
    num_last_layers_in_bf16: NonNegativeInt = setting(
        0, "Layers at the end that precision fp8 leaves as they are, their cache too."
    )
    num_speculative_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=15)] = setting(
        "auto",
        "Tokens that are drafted for each answer from the other answers of its group and checked in one step, which "
        "changes no sample, once no answer waits; 0 is off, auto drafts on a GPU while step times say that it pays.",
    )
    page_size: PositiveInt = setting(16, "Tokens in one page of the key-value cache.")
    max_batch_size: PositiveInt = setting(256, "Answers that are decoded at the same time.")
    max_prefill_tokens: PositiveInt = setting(8192, "Prompt tokens computed in one forward pass.")
    kv_cache_gib: PositiveFloat | None = setting(
        None, "Memory of the key-value cache in GiB; null takes what the batch needs and the device has."
    )
    gpu_memory_utilization: float = setting(
        0.9, "Fraction of the GPU's memory that may be taken while sampling, by everything on it.", gt=0, le=1
    )


class VllmConfig(Section):
    precision: str | None = setting(None, "Number format of the sampler's weights; normally that of the policy.")
    kv_cache_dtype: str = setting("auto", "Number format of vLLM's key-value cache.")
    logprobs_mode: str = setting("processed_logprobs", "Whether logprobs are taken after or before temperature.")
    tensor_parallel_size: PositiveInt = setting(1, "GPUs that share one layer of the sampler.")
    pipeline_parallel_size: PositiveInt = setting(1, "Groups of layers of the sampler on different GPUs.")
    expert_parallel_size: PositiveInt = setting(1, "GPUs that share the experts of the sampler.")
    gpu_memory_utilization: float = setting(0.6, "Fraction of the GPU's memory that vLLM may take.", gt=0, le=1)
    max_model_len: PositiveInt | None = setting(None, "Longest sequence in tokens, prompt and answer.")
    enforce_eager: bool = setting(False, "Does without CUDA graphs.")
    load_format: str | None = setting(
        None, "How vLLM loads weights; null is auto, and dummy where all of them are pushed in training."
    )
    enable_prefix_caching: bool | None = setting(None, "Reuses cached prompts; null is true.")


class TrainingVllmConfig(VllmConfig):
    """vLLM as the sampler of a run: where it runs, how long it may be silent, how far from the trainer it may be."""

    tensor_parallel_size: PositiveInt = setting(
        1, "GPUs that share the layers of an engine, native or vLLM, on GPUs that only sample."
    )
    python: str | None = setting(
        None, "Python of an environment that has vLLM 0.25 or newer; null samples with the native engine instead."
    )
    env_vars: dict[str, str] | None = setting(None, "Environment variables of vLLM's process.")
    start_timeout_s: PositiveFloat = setting(1800.0, "Seconds in which vLLM must have started.")
    timeout_s: PositiveFloat = setting(
        600.0,
        "Seconds without a sign of life while sampling, or without an answer to any other request, that end the run.",
    )
    check_period: PositiveInt = setting(
        10, "Steps between comparisons of vLLM's log-probabilities with the trainer's; the first step compares too."
    )
    max_prob_error: float = setting(
        1.05, "Mean of exp(|difference of log-probabilities|) over the tokens compared, above which the run ends.", gt=1
    )


class ColocatedConfig(Section):
    enabled: bool = setting(
        True, "Samples on the GPUs that train, from the same weights; false: on those that resources names."
    )
    resources: ResourcesConfig = setting(ResourcesConfig, "GPUs that only sample, where enabled is false.")


class ColocatedModelConfig(Section):
    enabled: bool = setting(True, "Computes on the GPUs that train; false: on those that resources names.")
    resources: ResourcesConfig = setting(ResourcesConfig, "GPUs of its own, where enabled is false.")


class ReferenceConfig(Section):
    colocated: ColocatedModelConfig = setting(ColocatedModelConfig, "Whether it shares the GPUs that train.")


class GenerationConfig(Section):
    backend: str = setting("native", "Engine that samples: native, or vllm if vllm_cfg.python names its environment.")
    max_new_tokens: PositiveInt = setting(..., "Longest answer in tokens; the total sequence length also bounds it.")
    temperature: Temperature = setting(1.0, "Divides the logits, in sampling and in training; 0 is greedy.")
    top_p: TopP = setting(1.0, "Samples from the smallest set of tokens with this much probability; 1 is off.")
    top_k: TopK | None = setting(None, "Samples from this many likeliest tokens; null, 0 or -1 is off.")
    val_temperature: Temperature = setting(1.0, "Temperature during validation; 0 is greedy.")
    val_top_p: TopP = setting(1.0, "top_p during validation.")
    val_top_k: TopK | None = setting(None, "top_k during validation.")
    stop_token_ids: list[int] | None = setting(None, "Token ids that end an answer; null is the model's own.")
    stop_strings: list[str] | None = setting(None, "Texts that end an answer; they stay in it.")
    ignore_eos: bool = setting(False, "Samples exactly max_new_tokens, for benchmarks.")
    native_cfg: NativeConfig = setting(NativeConfig, "Settings of the native engine.")
    vllm_cfg: TrainingVllmConfig = setting(TrainingVllmConfig, "Settings of vLLM.")
    vllm_kwargs: FreeMap = setting(dict, "Passed to `vllm.LLM` as they are.")
    colocated: ColocatedConfig = setting(ColocatedConfig, "Whether the GPUs that train also sample.")

    @property
    def uses_vllm(self) -> bool:
        return self.backend == "vllm" and self.vllm_cfg.python is not None


PackingAlgorithm = Literal[
    "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"
]


class TokenizerConfig(Section):
    name: str = setting(..., "Folder or hub name of the tokenizer; normally that of the model.")
    chat_template: str | None = setting(
        "default",
        "Chat template: default (the model's), null (none), extra_id (NeMo-Aligner's), a .jinja file or its text.",
    )
    chat_template_kwargs: FreeMap | None = setting(None, "Extra variables for the chat template.")


class LoraConfig(Section):
    enabled: bool = setting(False, "Trains low-rank adapters instead of all weights.")
    target_modules: list[str] = setting(list, "Names of the modules that get an adapter.")
    exclude_modules: list[str] = setting(list, "Names of modules that get none.")
    match_all_linear: bool = setting(True, "Adapts every linear layer; target_modules is then not read.")
    dim: PositiveInt = setting(8, "Rank of the adapters.")
    alpha: PositiveInt = setting(32, "Adapters are scaled by alpha / dim.")
    dropout: float = setting(0.0, "Probability of dropping an adapter input.", ge=0, lt=1)
    lora_A_init: Literal["xavier", "uniform"] = setting("xavier", "How the first adapter matrix starts.")


class DtensorConfig(Section):
    activation_checkpointing: bool | Literal["auto"] = setting(
        False,
        "Recomputes activations in the backward pass: less memory, about a third more time; auto: where it has to.",
    )
    tensor_parallel_size: PositiveInt = setting(1, "Ranks of one machine that share each layer, also in sampling.")
    sequence_parallel: bool = setting(
        False,
        "Ranks that share layers have parts of each row in between, in training: norms and residuals of its tokens.",
    )
    context_parallel_size: PositiveInt = setting(
        1, "Ranks that share each row of tokens in training; each then needs less memory for activations."
    )
    expert_parallel_size: PositiveInt | None = setting(
        None, "Ranks that share the experts of each layer, also in sampling; each has its own tokens; null is one."
    )
    dp_replicate_size: PositiveInt | None = setting(
        None, "Groups of ranks with a whole model each, between which only gradients travel; null is one."
    )
    cpu_offload: bool = setting(
        False,
        "Keeps parameters, gradients and optimizer states in CPU memory: a layer's parameters come to the GPU while it "
        "computes, all of them while the native engine samples.",
    )
    lora_cfg: LoraConfig = setting(LoraConfig, "Low-rank adapters.")


ADAMS = ("torch.optim.AdamW", "torch.optim.Adam")  # whose state can be in other places and formats
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "8bit": "int8"}


class OptimizerConfig(Section):
    name: str = setting("torch.optim.AdamW", "Dotted path of the optimizer class.")
    kwargs: FreeMap = setting(dict, "Its arguments: lr, weight_decay, betas and so on.")
    state_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "float32",
        "Number format of Adam's two moments, 4, 2 or 1 bytes each; the shorter ones are rounded stochastically.",
    )
    master_weights: Literal["float32", "none"] = setting(
        "float32",
        "Copies of bfloat16 weights that updates are added to; none rounds the weights themselves stochastically.",
    )
    offload_states: bool = setting(False, "Keeps moments and masters in CPU memory and streams them through the GPU.")

    @field_validator("state_dtype", "master_weights", mode="before")
    @classmethod
    def _short_names(cls, value: object) -> Any:
        return _PRECISIONS.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _compact_state_is_adams(self) -> OptimizerConfig:
        changed = self.state_dtype != "float32" or self.master_weights != "float32" or self.offload_states
        if changed and self.name not in ADAMS:
            raise ValueError(
                f"state_dtype, master_weights, offload_states are for torch.optim.AdamW and Adam, not {self.name}"
            )
        return self


class DynamicBatchingConfig(Section):
    enabled: bool = setting(False, "Cuts micro-batches by tokens instead of by samples.")
    train_mb_tokens: PositiveInt | None = setting(None, "Tokens in one training micro-batch.")
    logprob_mb_tokens: PositiveInt | None = setting(None, "Tokens in one logprob micro-batch.")


class SequencePackingConfig(Section):
    enabled: bool = setting(False, "Puts several sequences into one row, without padding.")
    train_mb_tokens: PositiveInt | None = setting(None, "Tokens in one training micro-batch.")
    logprob_mb_tokens: PositiveInt | None = setting(None, "Tokens in one logprob micro-batch.")
    algorithm: PackingAlgorithm = setting("modified_first_fit_decreasing", "How sequences fill micro-batches.")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _known_algorithm(cls, name: object) -> object:
        if not isinstance(name, str) or name.lower() not in get_args(PackingAlgorithm):
            raise ValueError(f"must be one of {', '.join(get_args(PackingAlgorithm))}")
        return name.lower()


class RouterReplayConfig(Section):
    enabled: bool = setting(
        False,
        "Records the experts that the sampler chooses and trains every token with them; train/router_mismatch is the "
        "share of tokens for which the trainer would have chosen others.",
    )


class VisionConfig(Section):
    train_tower: bool = setting(
        False,
        "Trains the vision tower and its projector too, in full or, with LoRA, by adapters; otherwise they stay as "
        "they are, and each image passes through them once.",
    )


class RewardModelConfig(OpenSection):
    enabled: bool = setting(False, "Gives the model a scoring layer; true in `posttrain rm` and nowhere else.")


def automatic_schedule(num_steps: int) -> list[JsonObject]:
    """What `policy.scheduler: auto` is in a run of this many steps: its warm-up never takes most of the run."""
    warm_up = min(50, num_steps // 10)
    # Always the same classes, so that a run of a few steps can be resumed with more.
    first = {"start_factor": 0.1 if warm_up else 1.0, "end_factor": 1.0, "total_iters": warm_up or 1}
    return [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": first},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}},
        {"milestones": [warm_up or 1]},
    ]


def is_automatic(scheduler: object) -> bool:
    """Whether it is the automatic schedule of a run of some length, or the default of earlier versions."""
    try:
        num_steps = 10 * scheduler[0]["kwargs"]["total_iters"]  # type: ignore[index]
    except (TypeError, LookupError):
        return False
    return scheduler in (automatic_schedule(num_steps), automatic_schedule(1))


class PolicyConfig(Section):
    """The model of any algorithm. `generation` is null where nothing is sampled."""

    model_name: str = setting(..., "Folder or hub name of the model to train.")
    tokenizer: TokenizerConfig = setting(..., "The tokenizer and its chat template.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model lives; auto prefers cuda.")
    num_threads: PositiveInt | None = setting(None, "CPU threads of each worker; null lets PyTorch decide.")
    deterministic: bool = setting(
        False, "The same bits every time on a GPU too, somewhat slower: a resumed run equals the uninterrupted one."
    )
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "bfloat16",
        "Number format of weights and activations; float32 by default where a run has CPUs only; for that of the "
        "optimizer see optimizer.state_dtype.",
    )
    fp8: bool = setting(
        False,
        "Computes products of the layers and gradients of their inputs in FP8, in training and log-probabilities; on "
        "one GPU of Ada, Hopper or newer, with precision bfloat16.",
    )
    train_global_batch_size: PositiveInt = setting(..., "Samples (GRPO, SFT) or pairs (DPO) of one optimizer step.")
    train_micro_batch_size: PositiveInt = setting(
        ..., "Samples or pairs in one forward and backward pass, where neither packing nor dynamic batching decides."
    )
    logprob_batch_size: PositiveInt = setting(..., "Samples in one forward pass for log-probabilities.")
    max_total_sequence_length: PositiveInt = setting(..., "Longest sequence in tokens, prompt and answer.")
    logprob_chunk_size: PositiveInt | None = setting(None, "Tokens whose logits exist at once; null picks a size.")
    max_grad_norm: PositiveFloat | None = setting(1.0, "Gradients are scaled down to this norm; null does not.")
    hf_config_overrides: FreeMap = setting(dict, "Entries of the model's config.json to replace.")
    model_proof: Literal["auto", "always", "never"] = setting(
        "auto",
        "Before the run, compares log-probabilities of a few tokens, packed and decoded, with the model's own forward "
        "pass, and refuses the model if they differ; auto does so for families without tests of their own, and warns "
        "for the others on a GPU that holds the whole model.",
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig, "The optimizer.")
    scheduler: Literal["auto"] | list[FreeMap] | FreeMap | None = setting(
        None,
        "Learning-rate schedule in steps: {name, kwargs}, or a list ending in {milestones}; null is constant; auto is "
        "a linear warm-up over a tenth of the run's steps, at most 50, then constant.",
    )
    dtensor_cfg: DtensorConfig = setting(DtensorConfig, "Training with PyTorch, and LoRA.")
    dynamic_batching: DynamicBatchingConfig = setting(DynamicBatchingConfig, "Micro-batches by tokens.")
    sequence_packing: SequencePackingConfig = setting(SequencePackingConfig, "Several sequences in one row.")
    router_replay: RouterReplayConfig = setting(RouterReplayConfig, "The sampler's choice of experts in training.")
    vision: VisionConfig = setting(VisionConfig, "Images, for models with a vision tower.")
    reward_model_cfg: RewardModelConfig = setting(RewardModelConfig, "The model as reward model.")
    reference: ReferenceConfig = setting(ReferenceConfig, "The frozen starting policy.")
    generation: GenerationConfig | None = setting(None, "Sampling; null where nothing is sampled.")

    @field_validator("scheduler")
    @classmethod
    def _schedule_is_well_formed(cls, scheduler: Any) -> Any:
        if scheduler is None or scheduler == "auto":
            return scheduler
        if isinstance(scheduler, dict):
            _check_schedule_part(scheduler, "it")
            return scheduler
        parts = [entry for entry in scheduler if "milestones" not in entry]
        milestones = [entry for entry in scheduler if "milestones" in entry]
        for index, part in enumerate(parts):
            _check_schedule_part(part, f"entry {index + 1}")
        steps = [step for entry in milestones for step in entry["milestones"]]
        if len(parts) > 1 and len(steps) != len(parts) - 1:
            raise ValueError(f"has {len(parts)} schedules, which need {len(parts) - 1} milestones; got {steps}")
        return scheduler

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        lora = self.dtensor_cfg.lora_cfg
        if "lr" not in self.optimizer.kwargs:
            yield f"policy.optimizer.kwargs.lr is not set: {self.optimizer.name} needs a learning rate"
        if self.fp8 and self.precision != "bfloat16":
            yield f"policy.fp8 quantises weights in bfloat16, and policy.precision = {self.precision}: use bfloat16"
        if self.fp8 and self.device == "cpu":
            yield "policy.fp8 needs a GPU with FP8 matrix units (Ada, Hopper or newer), and policy.device = cpu"
        if self.fp8 and lora.enabled and lora.dropout:
            yield (
                f"policy.fp8 with policy.dtensor_cfg.lora_cfg.dropout = {lora.dropout}: layers with dropout are not "
                "fused, and their products would not be in FP8; set one of them to its default"
            )
        if self.router_replay.enabled and self.generation is None:
            yield "policy.router_replay.enabled = true replays what a sampler chose, and this run samples nothing"
        if self.router_replay.enabled and (cp := self.dtensor_cfg.context_parallel_size) > 1:
            yield (
                f"policy.router_replay.enabled = true with policy.dtensor_cfg.context_parallel_size = {cp}: ranks that "
                "share rows do not replay; set one of them to its default"
            )
        if self.vision.train_tower and self.reward_model_cfg.enabled:
            yield "policy.vision.train_tower = true: reward models see no images"
        ep = self.dtensor_cfg.expert_parallel_size or 1
        if self.dtensor_cfg.sequence_parallel and ep > 1:
            yield (
                f"policy.dtensor_cfg.sequence_parallel = true with expert_parallel_size = {ep}: routers see whole "
                "rows; set one of them to its default"
            )
        if self.dtensor_cfg.cpu_offload:
            yield from self._offload_problems()
        tp = self.dtensor_cfg.tensor_parallel_size
        for name in ("state_dtype", "master_weights"):
            if tp > 1 and (value := getattr(self.optimizer, name)) != "float32":
                yield (
                    f"policy.optimizer.{name} = {value} with policy.dtensor_cfg.tensor_parallel_size = {tp}: that "
                    "state is kept by whole rows, and here ranks hold parts of rows; set one of them to its default"
                )

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        if self.dtensor_cfg.sequence_parallel and self.dtensor_cfg.tensor_parallel_size == 1:
            yield (
                "policy.dtensor_cfg.sequence_parallel: splits rows between ranks that share layers, and "
                "tensor_parallel_size is 1: no effect"
            )

    def _offload_problems(self) -> Iterator[str]:
        field, generation = "policy.dtensor_cfg.cpu_offload = true", self.generation
        if (ep := self.dtensor_cfg.expert_parallel_size or 1) > 1:
            yield f"{field} with policy.dtensor_cfg.expert_parallel_size = {ep}: experts stay on GPUs; unset one"
        if self.fp8:
            yield f"{field} with policy.fp8 = true, which needs weights on the GPU: set one of them to false"
        if generation is not None and generation.uses_vllm and generation.colocated.enabled:
            yield (
                f"{field} with policy.generation.backend = vllm on the same GPUs, which hands over weights there: use "
                "native, or GPUs that only sample (policy.generation.colocated.enabled=false)"
            )


def _check_schedule_part(part: FreeMap, what: str) -> None:
    unknown = sorted(set(part) - {"name", "kwargs"})
    if unknown or not isinstance(part.get("name"), str) or not isinstance(part.get("kwargs", {}), dict):
        raise ValueError(
            f"must be made of {{name: dotted.path, kwargs: {{…}}}} and {{milestones: […]}}; {what} is {part}"
        )


class GrpoPolicyConfig(PolicyConfig):
    """The model of an algorithm that samples."""

    generation: GenerationConfig = setting(..., "Sampling.")
