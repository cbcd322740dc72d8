"""`policy`: the model that is trained, its optimizer, and how the work is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import FreeMap, IsSetByUser, OpenSection, PositiveFloat, PositiveInt, Section
from posttrain.config.generation import GenerationConfig

PackingAlgorithm = Literal[
    "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"
]


class TokenizerConfig(Section):
    name: str = Field(description="Folder or hub name of the tokenizer; normally that of the model.")
    chat_template: str | None = Field(
        default="default",
        description="Chat template: default (the model's), null (none), extra_id (NeMo-Aligner's), a .jinja file or "
        "its text.",
    )
    chat_template_kwargs: FreeMap | None = Field(default=None, description="Extra variables for the chat template.")


class LoraConfig(Section):
    enabled: bool = Field(default=False, description="Trains low-rank adapters instead of all weights.")
    target_modules: list[str] = Field(default_factory=list, description="Names of the modules that get an adapter.")
    exclude_modules: list[str] = Field(default_factory=list, description="Names of modules that get none.")
    match_all_linear: bool = Field(
        default=True, description="Adapts every linear layer; target_modules is then not read."
    )
    dim: PositiveInt = Field(default=8, description="Rank of the adapters.")
    alpha: PositiveInt = Field(default=32, description="Adapters are scaled by alpha / dim.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Probability of dropping an adapter input."
    )
    lora_A_init: Literal["xavier", "uniform"] = Field(
        default="xavier", description="How the first adapter matrix starts: xavier or uniform."
    )


class DtensorConfig(Section):
    activation_checkpointing: bool | Literal["auto"] = Field(
        default=False,
        description="Recomputes activations in the backward pass: less memory, about a third more time; auto: where "
        "it has to.",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Ranks that share each layer, in training and in sampling; all on one machine."
    )
    context_parallel_size: PositiveInt = Field(
        default=1,
        description="Ranks that share each row of tokens in training; each then needs less memory for activations.",
    )
    dp_replicate_size: PositiveInt | None = Field(
        default=None,
        description="Groups of ranks with a whole model each, between which only gradients travel; null is one.",
    )
    lora_cfg: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")


_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "8bit": "int8"}


class OptimizerConfig(Section):
    name: str = Field(default="torch.optim.AdamW", description="Dotted path of the optimizer class.")
    kwargs: FreeMap = Field(default_factory=dict, description="Its arguments: lr, weight_decay, betas and so on.")
    state_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="Number format of Adam's two moments, 4, 2 or 1 bytes each; the shorter ones are rounded "
        "stochastically.",
    )
    master_weights: Literal["float32", "none"] = Field(
        default="float32",
        description="Copies of bfloat16 weights that updates are added to; none rounds the weights themselves "
        "stochastically.",
    )
    offload_states: bool = Field(
        default=False, description="Keeps moments and masters in CPU memory and streams them through the GPU."
    )

    @field_validator("state_dtype", "master_weights", mode="before")
    @classmethod
    def _short_names(cls, value: object) -> Any:
        return _PRECISIONS.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _compact_state_is_adams(self) -> OptimizerConfig:
        changed = self.state_dtype != "float32" or self.master_weights != "float32" or self.offload_states
        if changed and self.name not in ("torch.optim.AdamW", "torch.optim.Adam"):
            raise ValueError(
                "state_dtype, master_weights and offload_states are for torch.optim.AdamW and torch.optim.Adam, not "
                f"{self.name}"
            )
        return self


class DynamicBatchingConfig(Section):
    enabled: bool = Field(default=False, description="Cuts micro-batches by tokens instead of by samples.")
    train_mb_tokens: PositiveInt | None = Field(default=None, description="Tokens in one training micro-batch.")
    logprob_mb_tokens: PositiveInt | None = Field(default=None, description="Tokens in one logprob micro-batch.")


class SequencePackingConfig(Section):
    enabled: bool = Field(default=False, description="Puts several sequences into one row, without padding.")
    train_mb_tokens: PositiveInt | None = Field(default=None, description="Tokens in one training micro-batch.")
    logprob_mb_tokens: PositiveInt | None = Field(default=None, description="Tokens in one logprob micro-batch.")
    algorithm: PackingAlgorithm = Field(
        default="modified_first_fit_decreasing", description="How sequences are placed into micro-batches."
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _known_algorithm(cls, name: object) -> object:
        if not isinstance(name, str) or name.lower() not in get_args(PackingAlgorithm):
            raise ValueError(f"must be one of {', '.join(get_args(PackingAlgorithm))}")
        return name.lower()


class RewardModelConfig(OpenSection):
    enabled: bool = Field(
        default=False, description="Gives the model a scoring layer; true in `posttrain rm` and nowhere else."
    )


class PolicyConfig(Section):
    """The model of any algorithm. `generation` is null where nothing is sampled."""

    model_name: str = Field(description="Folder or hub name of the model to train.")
    tokenizer: TokenizerConfig = Field(description="The tokenizer and its chat template.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model lives; auto prefers cuda."
    )
    num_threads: PositiveInt | None = Field(
        default=None, description="CPU threads of each worker; null lets PyTorch decide."
    )
    deterministic: bool = Field(
        default=False,
        description="The same bits every time on a GPU too, somewhat slower: a resumed run equals the uninterrupted "
        "one.",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="Number format of weights and activations; for that of the optimizer see optimizer.state_dtype.",
    )
    fp8: bool = Field(
        default=False,
        description="Computes products of the layers and gradients of their inputs in FP8, in training and "
        "log-probabilities; on one GPU of Ada, Hopper or newer, with precision bfloat16.",
    )
    train_global_batch_size: PositiveInt = Field(
        description="Samples (GRPO, SFT) or pairs (DPO) that make one optimizer step."
    )
    train_micro_batch_size: PositiveInt = Field(
        description="Samples or pairs in one forward and backward pass, where neither packing nor dynamic batching "
        "decides."
    )
    logprob_batch_size: PositiveInt = Field(description="Samples in one forward pass for log-probabilities.")
    max_total_sequence_length: PositiveInt = Field(description="Longest sequence in tokens, prompt and answer.")
    logprob_chunk_size: PositiveInt | None = Field(
        default=None, description="Tokens whose logits exist at the same time; null picks a size."
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null does not."
    )
    hf_config_overrides: FreeMap = Field(
        default_factory=dict, description="Entries of the model's config.json to replace."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    scheduler: list[FreeMap] | FreeMap | None = Field(
        default=None,
        description="Learning-rate schedule in steps: {name, kwargs}, or a list ending in {milestones}; null is "
        "constant.",
    )
    dtensor_cfg: DtensorConfig = Field(default_factory=DtensorConfig, description="Training with PyTorch, and LoRA.")
    dynamic_batching: DynamicBatchingConfig = Field(
        default_factory=DynamicBatchingConfig, description="Micro-batches by tokens."
    )
    sequence_packing: SequencePackingConfig = Field(
        default_factory=SequencePackingConfig, description="Several sequences in one row."
    )
    reward_model_cfg: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="The model as reward model."
    )
    generation: GenerationConfig | None = Field(default=None, description="Sampling; null where nothing is sampled.")

    @field_validator("scheduler")
    @classmethod
    def _schedule_is_well_formed(cls, scheduler: Any) -> Any:
        if scheduler is None:
            return None
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
            yield (
                f"policy.optimizer.kwargs.lr is not set, and {self.optimizer.name} would choose one of its own: "
                "set policy.optimizer.kwargs.lr"
            )
        if self.fp8 and self.precision != "bfloat16":
            yield f"policy.fp8 quantises weights in bfloat16, and policy.precision = {self.precision}: use bfloat16"
        if self.fp8 and self.device == "cpu":
            yield "policy.fp8 needs a GPU with FP8 matrix units (Ada, Hopper or newer), and policy.device = cpu"
        if self.fp8 and lora.enabled and lora.dropout:
            yield (
                f"policy.fp8 with policy.dtensor_cfg.lora_cfg.dropout = {lora.dropout}: layers with dropout are not "
                "fused, and their products would not be in FP8; set one of them to its default"
            )
        tp = self.dtensor_cfg.tensor_parallel_size
        for name in ("state_dtype", "master_weights"):
            if tp > 1 and (value := getattr(self.optimizer, name)) != "float32":
                yield (
                    f"policy.optimizer.{name} = {value} with policy.dtensor_cfg.tensor_parallel_size = {tp}: that "
                    "state is kept by whole rows, and here ranks hold parts of rows; set one of them to its default"
                )


def _check_schedule_part(part: FreeMap, what: str) -> None:
    unknown = sorted(set(part) - {"name", "kwargs"})
    if unknown or not isinstance(part.get("name"), str) or not isinstance(part.get("kwargs", {}), dict):
        raise ValueError(
            f"must be made of {{name: dotted.path, kwargs: {{…}}}} and {{milestones: […]}}; {what} is {part}"
        )


class GrpoPolicyConfig(PolicyConfig):
    """The model of an algorithm that samples."""

    generation: GenerationConfig = Field(description="Sampling.")
