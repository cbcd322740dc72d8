"""`policy.generation`: how completions are sampled, and by which engine.

The native engine samples from the modules that are being trained. Settings of other engines are part of the
vocabulary, so that files written for them load; `unimplemented.py` says what becomes of them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from posttrain.config.base import FreeMap, OpenSection, Port, PositiveFloat, PositiveInt, Section

TopK = Annotated[int, Field(ge=-1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]


class NativeConfig(Section):
    page_size: PositiveInt = Field(default=16, description="Tokens in one page of the key-value cache.")
    max_batch_size: PositiveInt = Field(default=256, description="Answers that are decoded at the same time.")
    max_prefill_tokens: PositiveInt = Field(default=8192, description="Prompt tokens computed in one forward pass.")
    kv_cache_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of the key-value cache in GiB; null takes what the batch needs and the device has.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9,
        description="Fraction of the GPU's memory that may be taken while sampling, by everything on it.",
    )


class VllmConfig(Section):
    async_engine: bool = Field(default=False, description="Uses vLLM's asynchronous engine.")
    precision: str | None = Field(
        default=None, description="Number format of the sampler's weights; normally that of the policy."
    )
    kv_cache_dtype: str = Field(default="auto", description="Number format of vLLM's key-value cache.")
    logprobs_mode: str = Field(
        default="processed_logprobs", description="Whether logprobs are taken after or before temperature."
    )
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs that share one layer of the sampler.")
    pipeline_parallel_size: PositiveInt = Field(
        default=1, description="Groups of layers of the sampler on different GPUs."
    )
    expert_parallel_size: PositiveInt = Field(default=1, description="GPUs that share the experts of the sampler.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.6, description="Fraction of the GPU's memory that vLLM may take."
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest sequence in tokens, prompt and answer."
    )
    enforce_eager: bool = Field(default=False, description="Does without CUDA graphs.")
    use_tqdm: bool = Field(default=True, description="Shows vLLM's own progress bar.")
    use_deep_gemm: bool = Field(default=False, description="Uses DeepGEMM kernels for FP8.")
    num_last_layers_in_bf16: int = Field(default=0, description="Last layers that stay in bf16 under FP8.")
    num_first_layers_in_bf16: int = Field(default=0, description="First layers that stay in bf16 under FP8.")
    enable_vllm_metrics_logger: bool = Field(default=True, description="Collects vLLM's own timelines.")
    vllm_metrics_logger_interval: PositiveFloat = Field(
        default=0.5, description="Seconds between two samples of those timelines."
    )
    http_refit_api_key_env_var: str | None = Field(
        default=None, description="Variable that holds the key of the remote refit API."
    )
    http_refit_server_port: Port | None = Field(default=None, description="Port of the remote refit server over HTTP.")
    zmq_refit_server_port: Port | None = Field(default=None, description="Port of the remote refit server over ZMQ.")
    reset_encoder_cache_after_weight_update: bool = Field(
        default=False, description="Drops cached image features after a refit."
    )
    skip_tokenizer_init: bool | None = Field(
        default=None, description="Loads no tokenizer inside vLLM; null lets it decide."
    )
    load_format: str | None = Field(
        default=None, description="How vLLM loads weights; null is dummy in training, auto otherwise."
    )
    enable_prefix_caching: bool | None = Field(
        default=None, description="Reuses cached prompts; null lets vLLM decide."
    )
    expose_http_server: bool | None = Field(default=None, description="Serves the sampler over HTTP during training.")
    env_vars: FreeMap | None = Field(default=None, description="Environment variables of the vLLM workers.")
    is_mx: bool | None = Field(default=None, description="Weights are in a microscaling format.")
    video: FreeMap | None = Field(default=None, description="Video input of multimodal models.")
    limit_mm_per_prompt: FreeMap | None = Field(
        default=None, description="Images, videos or clips allowed in one prompt."
    )


class ColocatedResourcesConfig(Section):
    gpus_per_node: PositiveInt | None = Field(default=None, description="GPUs of each node reserved for sampling.")
    num_nodes: PositiveInt | None = Field(default=None, description="Nodes reserved for sampling.")


class ColocatedConfig(Section):
    enabled: bool = Field(default=True, description="Sampling and training share the same GPUs.")
    resources: ColocatedResourcesConfig = Field(
        default_factory=ColocatedResourcesConfig, description="What sampling gets when it has GPUs of its own."
    )


class NixlRefitConfig(OpenSection):
    update_weights_bucket_memory_ratio: PositiveFloat = Field(
        default=0.05, description="Fraction of GPU memory for one bucket."
    )
    device: str = Field(default="cuda", description="Device of the transfer buffers.")
    backend_name: str = Field(default="UCX", description="NIXL transport.")
    backend_init_params: FreeMap | None = Field(default=None, description="Parameters of that transport.")
    release_after_refit: bool = Field(default=False, description="Frees the buffers after each transfer.")
    shard_expert_weights: bool = Field(default=False, description="Sends each expert only where it is used.")


class RefitConfig(OpenSection):
    nixl: NixlRefitConfig = Field(default_factory=NixlRefitConfig, description="Weight transfer through NIXL.")


class McoreGenerationConfig(OpenSection):
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest sequence in tokens, prompt and answer."
    )
    cuda_graph_impl: str = Field(default="local", description="Kind of CUDA graphs.")
    inference_cuda_graph_scope: str = Field(default="block", description="What one CUDA graph covers.")
    buffer_size_gb: PositiveFloat = Field(default=10.0, description="Memory of the key-value cache in GB.")
    num_cuda_graphs: int = Field(default=4, description="Number of CUDA graphs.")
    block_size_tokens: PositiveInt = Field(default=256, description="Tokens in one block of the key-value cache.")
    use_cuda_graphs_for_non_decode_steps: bool = Field(default=True, description="Captures prefill as well.")
    enable_chunked_prefill: bool = Field(default=True, description="Splits long prompts.")
    enable_prefix_caching: bool = Field(default=False, description="Reuses cached prompts.")
    max_tokens: PositiveInt = Field(default=16384, description="Tokens in one forward pass.")
    kv_cache_management_mode: str = Field(default="persist", description="What happens to the cache between steps.")
    materialize_only_last_token_logits: bool = Field(
        default=True, description="Computes logits only where they are sampled."
    )
    num_speculative_tokens: int = Field(default=0, description="Tokens drafted ahead.")
    refit_backend: str = Field(default="nccl", description="How weights reach the engine.")
    parsers: list[Any] = Field(default_factory=list, description="Parsers of tool calls and reasoning.")
    expose_http_server: bool = Field(default=False, description="Serves the engine over HTTP.")


class GenerationConfig(Section):
    backend: str = Field(
        default="native", description="Engine that samples: native; vllm is accepted and means native."
    )
    max_new_tokens: PositiveInt = Field(
        description="Longest answer in tokens; the total sequence length also bounds it."
    )
    temperature: Temperature = Field(
        default=1.0, description="Divides the logits, in sampling and in training; 0 is greedy."
    )
    top_p: TopP = Field(
        default=1.0, description="Samples from the smallest set of tokens with this much probability; 1 is off."
    )
    top_k: TopK | None = Field(
        default=None, description="Samples from this many likeliest tokens; null, 0 or -1 is off."
    )
    val_temperature: Temperature = Field(default=1.0, description="Temperature during validation; 0 is greedy.")
    val_top_p: TopP = Field(default=1.0, description="top_p during validation.")
    val_top_k: TopK | None = Field(default=None, description="top_k during validation.")
    stop_token_ids: list[int] | None = Field(
        default=None, description="Token ids that end an answer; null is the model's own."
    )
    stop_strings: list[str] | None = Field(default=None, description="Texts that end an answer; they stay in it.")
    ignore_eos: bool = Field(default=False, description="Samples exactly max_new_tokens, for benchmarks.")
    native_cfg: NativeConfig = Field(default_factory=NativeConfig, description="Settings of the native engine.")
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig, description="Settings of vLLM.")
    vllm_kwargs: FreeMap = Field(default_factory=dict, description="Passed to vLLM as they are.")
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig, description="Who shares GPUs with whom.")
    mcore_generation_config: McoreGenerationConfig = Field(
        default_factory=McoreGenerationConfig, description="Settings of Megatron's engine."
    )
    port_range_low: Port = Field(default=3000, description="First port for engines that serve HTTP.")
    port_range_high: Port = Field(default=4999, description="Last port for engines that serve HTTP.")
    refit_transport: str | None = Field(
        default=None, description="How weights reach a sampler with its own copy; null decides."
    )
    refit_cfg: RefitConfig = Field(default_factory=RefitConfig, description="Settings of that transport.")
    real_quant_export_cpu_offload: bool = Field(
        default=True, description="Moves weights to the CPU while they are quantised."
    )
    bad_words: list[str] | None = Field(default=None, description="Texts that may not be sampled.")
    use_async_rollouts: bool | None = Field(
        default=None, description="Runs each rollout on its own; null lets the engine decide."
    )
    quant_cfg: str | FreeMap | None = Field(default=None, description="Quantisation of the sampler's weights.")
    real_quant: bool | None = Field(default=None, description="Quantises for real instead of simulating it.")
