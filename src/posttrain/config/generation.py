"""`policy.generation`: how completions are sampled, and by which engine.

The native engine samples from the modules that are being trained; vLLM runs in a process of its own and gets the
weights. Settings of other engines are in `foreign/nemo_rl.yaml`, so that files written for them load.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import FreeMap, NonNegativeInt, PositiveFloat, PositiveInt, Section, setting

TopK = Annotated[int, Field(ge=-1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]


# Arguments of `vllm.LLM` that a training run decides on, or reads from vllm_cfg: not to be given in vllm_kwargs.
ARGUMENTS_OF_VLLM_IN_USE = frozenset(
    {
        "model", "tokenizer", "load_format", "max_model_len", "logprobs_mode", "weight_transfer_config",
        "worker_extension_cls", "enable_sleep_mode", "enable_lora", "max_lora_rank", "max_loras",
        "tensor_parallel_size",
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


class ResourcesConfig(Section):
    gpus_per_node: PositiveInt | None = setting(
        None, "GPUs that only sample, of cluster.gpus_per_node; on several machines null is all."
    )
    num_nodes: PositiveInt | None = setting(
        None, "Machines that only sample, of cluster.num_nodes; null where there is one machine."
    )


class ColocatedConfig(Section):
    enabled: bool = setting(
        True, "Samples on the GPUs that train, from the same weights; false: on those that resources names."
    )
    resources: ResourcesConfig = setting(ResourcesConfig, "GPUs that only sample, where enabled is false.")


class GenerationConfig(Section):
    backend: str = setting(
        "native", "Engine that samples: native, or vllm where vllm_cfg.python names its environment."
    )
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
