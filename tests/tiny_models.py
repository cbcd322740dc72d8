"""Random models of a few thousand parameters, one per family, and a tokenizer of bytes. Nothing is downloaded.

The weights are large enough for logits to be far from uniform: with the usual initialisation a wrong attention mask or
a wrong position would change log-probabilities by less than any tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from posttrain.models.attention_interface import ATTENTION, attention_context
from posttrain.models.loading import auto_class_of
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

VOCAB_SIZE = 96
SLIDING_WINDOW = 5  # shorter than the sequences of the tests
# How far two ways to compute a log-probability may be apart in float32. On the way from a token to its logits there are
# about 450 additions (two or three layers with sums over 32, 48 and up to 64 terms), each of which errs by up to eps =
# 1.2e-7 of the largest partial sum, which is of order 10. A wrong mask, position or weight changes log-probabilities by
# 0.1 and more. `tests/invariants/test_sampler_equals_trainer.py` compares in float64.
LOGPROB_ROUNDING = 5e-4

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_DELTA_NET: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 4,
    "mamba_chunk_size": 16,
}

# family -> (model_type of transformers, what it has beyond the common shape)
_TEXT_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    # Queries, keys and values in one projection; half of each head is rotated.
    "phi3": ("phi3", {"sliding_window": SLIDING_WINDOW, "partial_rotary_factor": 0.5}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    # The last layer has no positions.
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0], "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", {"logits_scaling": 1.7, "attention_multiplier": 0.4, "residual_multiplier": 0.8}),
    "cohere": ("cohere", {"logit_scale": 0.35}),
    # A logit of each head in the denominator of the softmax, experts with biases.
    "gpt-oss": (
        "gpt_oss",
        {"sliding_window": SLIDING_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "glm4-moe": (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 4}
        | {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"sliding_window": SLIDING_WINDOW, "global_head_dim": 16, "vocab_size_per_layer_input": 400}
        | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    ),
    "qwen3.5": ("qwen3_5_text", _DELTA_NET),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_DELTA_NET, **_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**_DELTA_NET, **_EXPERTS}),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        "granitemoehybrid",
        {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 16},
    ),
    "falcon-h1": (
        "falcon_h1",
        {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "embedding_multiplier": 1.7, "lm_head_multiplier": 0.4},
    ),
    # One block each: a mixer, attention, a mixer, an MLP.
    "nemotron-h": (
        "nemotron_h",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8}
        | {"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 16},
    ),
}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "patch_size": 2} | {
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# As most people download them: with towers for images and sound around a language model of above, which see none here.
_WRAPPERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "gemma3-vision": ("gemma3", "gemma3", {**_VISION, "image_size": 28, "patch_size": 14}),
    "gemma4-vision": (
        "gemma4",
        "gemma4",
        {**_VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 8},
    ),
    "mistral3-vision": (
        "mistral3",
        "mistral",
        {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    ),
    "qwen3.5-vision": ("qwen3_5", "qwen3.5", _QWEN_VISION),
    "qwen3.5-moe-vision": ("qwen3_5_moe", "qwen3.5-moe", _QWEN_VISION),
}
_FAMILIES = {
    **_TEXT_FAMILIES,
    **{
        name: (
            model_type,
            {"vision_config": vision, "mm_tokens_per_image": 4}
            | {"text_config": {"model_type": _TEXT_FAMILIES[inner][0], **_TEXT_FAMILIES[inner][1]}},
        )
        for name, (model_type, inner, vision) in _WRAPPERS.items()
    },
}
FAMILIES = tuple(_FAMILIES)
# transformers computes their recurrence in fp32, whatever the precision of the weights.
RECURRENT_FAMILIES = (
    *FAMILIES[FAMILIES.index("qwen3.5") : len(_TEXT_FAMILIES)],
    "qwen3.5-vision",
    "qwen3.5-moe-vision",
)


def tiny_model(
    family: str = "llama",
    *,
    attention: str = ATTENTION,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """The same family, seed and overrides always give the same weights, whatever the attention implementation."""
    model_type, extra = _FAMILIES[family]
    if "text_config" in extra:
        settings = {**extra, **overrides, "text_config": {**_COMMON, **extra["text_config"], **overrides}}
    else:
        settings = {**_COMMON, **extra, **overrides}
    config = AutoConfig.for_model(model_type, **settings)
    # The products that transformers prefers for experts do not exist in float64. The eager ones are a second way to
    # compute.
    experts = {"experts_implementation": "eager"} if attention == "eager" or dtype == torch.float64 else {}
    with torch.random.fork_rng():  # decays of recurrent layers are drawn, and `randomise` adds to them
        torch.manual_seed(seed)
        auto_class = AutoModelForImageTextToText if "text_config" in extra else AutoModelForCausalLM
        model: PreTrainedModel = auto_class.from_config(config, attn_implementation=attention, **experts)
    model.config.use_cache = False
    randomise(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))
        else:  # norms and biases: near what they were, but each different
            parameter.add_(noise * 0.1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient, by name; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and four special tokens, with a ChatML template. Lossless: any text survives encode and decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        padding_side="left",
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor "
        "%}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def packed_logprobs(model: nn.Module, batch: TokenBatch, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """Of all responses, in one packed row, as training computes them."""
    row = PackedRow.build(batch, torch.device("cpu"))
    with attention_context(row.attention):
        return TokenLogprobs(model, chunk)(row, temperature)


# -- saved models ------------------------------------------------------------------------------------------------------

PROMPT = torch.tensor([[5, 9, 200, 17, 3, 3, 90]])


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None) -> Tensor:
    """What plain transformers computes for `PROMPT`."""
    model = auto_class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    logits: Tensor = model.eval()(PROMPT).logits
    return logits
