"""Models of a named shape with random weights, made directly on the device, and a tokenizer that fits them. No files.

Weights are scaled so that activations and logits have a spread of about 1 whatever the shape: sampling then meets a
real distribution, and nothing overflows in bf16. `tiny` is for tests. A folder may stand wherever the name of a shape
may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from posttrain.errors import InputError
from posttrain.models.attention_interface import ATTENTION
from posttrain.policy.memory.model_shape import NAMED_CONFIGS

PAD, EOS = 0, 2  # ids of the tokenizer below; random prompts do not use them
FIRST_WORD = 3


@dataclass(frozen=True)
class Shape:
    """What decides the cost of a model: the family, and the sizes as its config.json names them."""

    family: str  # `model_type` of transformers
    architecture: str
    sizes: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        """The contents of a config.json."""
        return {
            "model_type": self.family,
            "architectures": [self.architecture],
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "max_position_embeddings": 32768,
            **self.sizes,
        }


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool, **rest: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rest.pop("head_dim", hidden // heads),
        "tie_word_embeddings": tied,
        **rest,
    }


def _llama(*sizes: int, tied: bool, **rest: Any) -> Shape:
    return Shape("llama", "LlamaForCausalLM", _sizes(*sizes, tied=tied, rope_theta=500000.0, **rest))


def _counted(name: str, architecture: str) -> Shape:
    """One of the planner's."""
    sizes = {key: value for key, value in NAMED_CONFIGS[name].items() if key != "model_type"}
    return Shape(str(NAMED_CONFIGS[name]["model_type"]), architecture, sizes)


# llama-8b and llama-70b have the sizes of Llama 3.1, the qwen ones those of Qwen2.5 0.5B and 1.5B (biases on q, k, v),
# Qwen3 8B (norms on q and k), Qwen3-30B-A3B and Qwen3.5 4B, gpt-oss-20b those of that model. There is no Llama of 0.5
# and 1.5 billion: these have the proportions of Llama 3.2 1B.
SHAPES: Mapping[str, Shape] = {
    "tiny": _llama(512, 64, 128, 2, 4, 2, tied=False),
    "llama-small": _llama(32000, 512, 2048, 4, 8, 4, tied=True),
    "llama-0.5b": _llama(128256, 1024, 4096, 24, 16, 8, tied=True),
    "llama-1.5b": _llama(128256, 2048, 8192, 20, 32, 8, tied=True),
    "llama-8b": _llama(128256, 4096, 14336, 32, 32, 8, tied=False, max_position_embeddings=131072),
    "llama-70b": _llama(128256, 8192, 28672, 80, 64, 8, tied=False, max_position_embeddings=131072),
    "qwen-0.5b": Shape(
        "qwen2", "Qwen2ForCausalLM", _sizes(151936, 896, 4864, 24, 14, 2, tied=True, rope_theta=1_000_000.0)
    ),
    "qwen-1.5b": Shape(
        "qwen2", "Qwen2ForCausalLM", _sizes(151936, 1536, 8960, 28, 12, 2, tied=True, rope_theta=1_000_000.0)
    ),
    "qwen-8b": Shape(
        "qwen3",
        "Qwen3ForCausalLM",
        _sizes(151936, 4096, 12288, 36, 32, 8, tied=False, head_dim=128, rope_theta=1_000_000.0),
    ),
    "qwen-30b-a3b": _counted("qwen-30b-a3b", "Qwen3MoeForCausalLM"),
    "qwen-hybrid-4b": _counted("qwen-hybrid-4b", "Qwen3_5ForCausalLM"),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        "GptOssForCausalLM",
        _sizes(
            201088, 2880, 2880, 24, 64, 8, tied=False, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
            sliding_window=128,
        ),
    ),
}  # fmt: skip


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise InputError(f"{name!r} is neither a folder with a model nor a shape; the shapes are {', '.join(SHAPES)}")
    return SHAPES[name]


def chosen_model(shape: str, folder: Path | None) -> str:
    """What the command line asks for, by name: the folder if there is one, else the shape. It must exist."""
    if folder is None:
        shape_of(shape)
        return shape
    if not (folder / "config.json").is_file():
        raise InputError(f"--model {folder}: no folder with the config.json of a model")
    return str(folder.absolute())


def make_model(
    shape: str, device: str | torch.device, dtype: torch.dtype, seed: int = 0, *, attention: str = ATTENTION
) -> PreTrainedModel:
    """A causal language model with random weights. Seed, shape, device and dtype decide them; the attention
    does not.
    """
    sizes = {
        key: value for key, value in shape_of(shape).config().items() if key not in ("model_type", "architectures")
    }
    config = AutoConfig.for_model(shape_of(shape).family, **sizes)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    randomise(model, seed)
    model.config.use_cache = False
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    if device.type == "meta":
        return
    generator = torch.Generator(device).manual_seed(seed)
    num_layers = sum(name.endswith(("o_proj.weight", "out_proj.weight")) for name in parameters)
    for name, parameter in parameters.items():
        if name.endswith(("A_log", "dt_bias")):
            continue  # decays as their layer draws them
        if parameter.dim() < 2 or name.endswith("bias"):
            parameter.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0)
            continue
        # What is added to the residual stream is damped, so that the stream does not grow with the depth.
        adds_to_stream = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
        spread = parameter.shape[-1] ** -0.5 * ((2 * num_layers) ** -0.5 if adds_to_stream else 1.0)
        parameter.normal_(0.0, spread, generator=generator)


def make_tokenizer(vocab_size: int, special: Mapping[int, str] = MappingProxyType({})) -> PreTrainedTokenizerFast:
    """A word per token: any sequence of ids can be written as text, and reads back as the same ids. `special` names
    tokens that a family needs by their ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {special.get(index, _word(index)): index for index in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token=_word(PAD)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_word(EOS), pad_token=_word(PAD), unk_token=_word(PAD), padding_side="left",
        additional_special_tokens=list(special.values()),
    )  # fmt: skip


def _word(index: int) -> str:
    # A special token is found inside other words too, so its name must occur in none of them.
    return {PAD: "<pad>", EOS: "<eos>"}.get(index, f"t{index}")


def as_text(ids: Sequence[int]) -> str:
    """What `make_tokenizer` reads as these ids."""
    return " ".join(map(_word, ids))


def open_model(
    name: str, device: str | torch.device, dtype: torch.dtype, seed: int = 0, *, attention: str = ATTENTION
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer: random weights of the shape `name`, or what is in the folder `name`."""
    if not Path(name).is_dir():
        model = make_model(name, device, dtype, seed, attention=attention)
        return model, make_tokenizer(model.config.vocab_size)
    loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention)
    loaded.config.use_cache = False
    return loaded.to(device).eval(), AutoTokenizer.from_pretrained(name)


def vocab_size_of(name: str) -> int:
    """How many tokens random prompts may be made of."""
    if not Path(name).is_dir():
        return int(shape_of(name).sizes["vocab_size"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    return min(int(AutoConfig.from_pretrained(name).vocab_size), max(tokenizer.get_vocab().values()) + 1)


def num_parameters(shape: str) -> int:
    """Counted without making any weight."""
    model = make_model(shape, "meta", torch.bfloat16)
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
