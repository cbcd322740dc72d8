"""`policy.megatron_cfg`: NeMo RL's second training backend. posttrain has no Megatron and reads only `enabled`.

The fields are here so that files which carry them load and round-trip; keys of other NeMo RL versions are carried along too.
"""

from __future__ import annotations

from pydantic import Field

from posttrain.config.base import FreeMap, OpenSection


class MegatronCheckpointConfig(OpenSection):
    async_save: bool = Field(default=True, description="Writes checkpoints in the background.")
    ckpt_assume_constant_structure: bool = Field(
        default=True, description="Assumes that every checkpoint has the same layout."
    )


class MegatronPeftConfig(OpenSection):
    enabled: bool = Field(default=False, description="Trains low-rank adapters.")
    target_modules: list[str] = Field(default_factory=list, description="Modules that get an adapter.")
    exclude_modules: list[str] = Field(default_factory=list, description="Modules that get none.")
    dim: int = Field(default=8, description="Rank of the adapters.")
    alpha: int = Field(default=32, description="Adapters are scaled by alpha / dim.")
    dropout: float = Field(default=0.0, description="Probability of dropping an adapter input.")
    dropout_position: str = Field(default="post", description="Dropout before or after the adapter.")
    lora_A_init_method: str = Field(default="xavier", description="How the first adapter matrix starts.")
    lora_B_init_method: str = Field(default="zero", description="How the second adapter matrix starts.")
    a2a_experimental: bool = Field(default=False, description="Experimental all-to-all communication.")
    lora_dtype: str | None = Field(default="None", description="Number format of the adapters.")


class MegatronOptimizerConfig(OpenSection):
    optimizer: str = Field(default="adam", description="Name of the optimizer.")
    lr: float = Field(default=5e-6, description="Learning rate.")
    min_lr: float = Field(default=5e-7, description="Learning rate at the end of the decay.")
    weight_decay: float = Field(default=0.01, description="Weight decay.")
    bf16: bool = Field(default=True, description="Trains in bf16.")
    fp16: bool = Field(default=False, description="Trains in fp16.")
    params_dtype: str = Field(default="float32", description="Number format of the master weights.")
    adam_beta1: float = Field(default=0.9, description="Adam's first beta.")
    adam_beta2: float = Field(default=0.999, description="Adam's second beta.")
    adam_eps: float = Field(default=1e-8, description="Adam's epsilon.")
    sgd_momentum: float = Field(default=0.9, description="Momentum of SGD.")
    use_distributed_optimizer: bool = Field(default=True, description="Shards the optimizer state.")
    use_precision_aware_optimizer: bool = Field(
        default=True, description="Keeps optimizer state in lower precision where it can."
    )
    clip_grad: float | None = Field(default=None, description="Largest gradient norm; normally policy.max_grad_norm.")
    optimizer_cpu_offload: bool = Field(default=False, description="Keeps the optimizer in CPU memory.")
    optimizer_offload_fraction: float = Field(default=0.0, description="Fraction of the optimizer kept there.")
    overlap_cpu_optimizer_d2h_h2d: bool = Field(default=False, description="Overlaps those copies with computing.")


class MegatronSchedulerConfig(OpenSection):
    start_weight_decay: float | None = Field(default=None, description="Weight decay at the start.")
    end_weight_decay: float | None = Field(default=None, description="Weight decay at the end.")
    weight_decay_incr_style: str = Field(default="constant", description="How it moves between the two.")
    lr_decay_style: str = Field(default="constant", description="How the learning rate decays.")
    lr_decay_iters: int | None = Field(default=1000, description="Steps of the decay.")
    lr_warmup_iters: int = Field(default=13, description="Steps of the warm-up.")
    lr_warmup_init: float = Field(default=5e-7, description="Learning rate at the first step.")


class MegatronDdpConfig(OpenSection):
    grad_reduce_in_fp32: bool = Field(default=False, description="Reduces gradients in fp32.")
    overlap_grad_reduce: bool = Field(default=True, description="Overlaps that with the backward pass.")
    overlap_param_gather: bool = Field(default=True, description="Overlaps gathering of weights with the forward pass.")
    use_custom_fsdp: bool = Field(default=False, description="Uses Megatron's own FSDP.")
    data_parallel_sharding_strategy: str = Field(default="optim_grads_params", description="What is sharded.")


class MegatronFp8Config(OpenSection):
    enabled: bool = Field(default=False, description="Trains in FP8.")
    fp8: str = Field(default="e4m3", description="FP8 number format.")
    fp8_recipe: str = Field(default="blockwise", description="How FP8 scales are chosen.")
    fp8_param: bool = Field(default=False, description="Stores weights in FP8.")


class MegatronConfig(OpenSection):
    enabled: bool = Field(default=False, description="Trains with Megatron-Core.")
    model_overrides: FreeMap = Field(default_factory=dict, description="Entries of Megatron's model config to replace.")
    checkpoint: MegatronCheckpointConfig = Field(
        default_factory=MegatronCheckpointConfig, description="How Megatron saves."
    )
    use_fused_linear_logprobs: bool = Field(
        default=False, description="Fuses the output layer with the log-probabilities."
    )
    fused_linear_logprobs_chunk_size: int = Field(default=256, description="Tokens in one piece of that fusion.")
    force_reconvert_from_hf: bool = Field(default=False, description="Converts the weights again at every start.")
    empty_unused_memory_level: int = Field(default=1, description="How often unused GPU memory is freed.")
    env_vars: FreeMap | None = Field(default=None, description="Environment variables of the workers.")
    gradient_accumulation_fusion: bool = Field(
        default=False, description="Fuses gradient accumulation into the backward pass."
    )
    use_gloo_process_groups: bool = Field(default=False, description="Makes gloo groups as well as NCCL ones.")
    defer_fp32_logits: bool | None = Field(default=False, description="Converts logits to fp32 late.")
    activation_checkpointing: bool = Field(default=False, description="Recomputes activations in the backward pass.")
    recompute_granularity: str | None = Field(default="full", description="How much is recomputed: full or selective.")
    recompute_modules: list[str] | None = Field(default=None, description="Modules that are recomputed.")
    fine_grained_activation_offloading: bool = Field(default=False, description="Moves activations to the CPU.")
    offload_modules: list[str] | None = Field(default=None, description="Modules whose activations are moved.")
    cuda_graph_impl: str = Field(default="none", description="Kind of CUDA graphs.")
    cuda_graph_modules: list[str] = Field(default_factory=list, description="Modules in CUDA graphs.")
    cuda_graph_warmup_steps: int = Field(default=3, description="Steps before CUDA graphs are captured.")
    tensor_model_parallel_size: int = Field(default=1, description="GPUs that share one layer.")
    expert_tensor_parallel_size: int = Field(default=1, description="GPUs that share one expert.")
    expert_model_parallel_size: int = Field(default=1, description="GPUs that share the experts.")
    pipeline_model_parallel_size: int = Field(default=1, description="Groups of layers on different GPUs.")
    context_parallel_size: int = Field(default=1, description="GPUs that share one sequence.")
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, description="Layers in the first stage.")
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, description="Layers in the last stage.")
    pipeline_dtype: str | None = Field(
        default=None, description="Number format between stages; normally policy.precision."
    )
    sequence_parallel: bool = Field(default=False, description="Splits activations along the sequence.")
    freeze_moe_router: bool = Field(default=True, description="Does not train the router.")
    moe_router_dtype: str | None = Field(default="fp64", description="Number format of the router.")
    moe_router_load_balancing_type: str = Field(default="none", description="How experts are balanced.")
    moe_router_bias_update_rate: float = Field(default=0.0, description="How fast the router's bias follows the load.")
    moe_permute_fusion: bool = Field(default=True, description="Fuses the routing of tokens.")
    moe_per_layer_logging: bool = Field(default=False, description="Logs the routing of every layer.")
    moe_enable_deepep: bool = Field(default=False, description="Uses DeepEP.")
    moe_token_dispatcher_type: str = Field(default="alltoall", description="How tokens reach their experts.")
    moe_shared_expert_overlap: bool = Field(default=False, description="Overlaps shared experts with communication.")
    apply_rope_fusion: bool = Field(default=True, description="Fuses rotary embeddings.")
    bias_activation_fusion: bool = Field(default=True, description="Fuses bias and activation.")
    use_fused_weighted_squared_relu: bool = Field(default=False, description="Fuses the weighted squared ReLU.")
    mtp_num_layers: int = Field(default=0, description="Layers that predict several tokens ahead.")
    mtp_loss_scaling_factor: float = Field(default=0.0, description="Weight of their loss.")
    mtp_use_repeated_layer: bool = Field(default=False, description="Uses one such layer several times.")
    mtp_detach_heads: bool = Field(default=False, description="Keeps their gradients out of the model.")
    peft: MegatronPeftConfig = Field(default_factory=MegatronPeftConfig, description="Low-rank adapters.")
    optimizer: MegatronOptimizerConfig = Field(default_factory=MegatronOptimizerConfig, description="The optimizer.")
    scheduler: MegatronSchedulerConfig = Field(default_factory=MegatronSchedulerConfig, description="Its schedule.")
    distributed_data_parallel_config: MegatronDdpConfig = Field(
        default_factory=MegatronDdpConfig, description="Data parallelism."
    )
    fp8_cfg: MegatronFp8Config = Field(default_factory=MegatronFp8Config, description="Training in FP8.")
