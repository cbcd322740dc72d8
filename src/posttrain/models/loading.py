"""Loads models and their tokenizers with transformers.

Raises `SettingsError` for what the user can fix: a missing folder, a name that the hub does not have, a config with
impossible values, weights that do not fit it.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.models.accepted_names import ModelReferenceError
from posttrain.models.attention_interface import ATTENTION
from posttrain.models.draft_layers import keep_drafts
from posttrain.models.folder_checks import problem_in
from posttrain.models.hub import why_unavailable
from posttrain.models.tensor_files import stored_parts
from posttrain.models.vision import add_tower, expander, image_tokens, refuse_images
from posttrain.types import ImageRef

# Raised by transformers while it reads a config or builds the modules of a model from it. ValueError also covers an
# unknown kind of model.
CONFIG_ERRORS = (
    StrictDataclassError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Families with tests of their own (docs/models.md). Others are proved before they are used: `engines/native/proof.py`.
TESTED_FAMILIES = frozenset(
    {
        "bamba", "cohere", "deepseek_v3", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
        "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoehybrid", "lfm2", "llama", "mistral",
        "mistral3", "mixtral", "nemotron_h", "phi", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
    }
)  # fmt: skip


class SettingsError(InputError):
    """The run's settings do not fit the model."""


def resolve_device(setting: str) -> torch.device:
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting == "cuda" and not torch.cuda.is_available():
        raise SettingsError("policy.device is cuda, but torch sees no CUDA device; use cpu or auto")
    return torch.device(setting)


def check_available(name: str, field: str, holding: str = "config.json and weights") -> None:
    """SettingsError, without the retries of the hub's client, if neither a folder nor the hub has the model."""
    if (reason := why_unavailable(name, holding)) is not None:
        raise SettingsError(f"{field}: {reason}")


def explain_missing(name: str, field: str, error: Exception) -> SettingsError:
    if Path(name).is_dir():
        return SettingsError(f"{field}: the folder {name!r} is not a Hugging Face model folder: {error}")
    return SettingsError(f"{field}: {name!r} is not a local folder and could not be fetched from the hub: {error}")


def check_model_exists(name: str, field: str = "policy.model_name") -> JsonObject:
    """The model's config as a mapping, read without loading weights; SettingsError if there is none."""
    check_available(name, field)
    try:
        config = checked_config(name, field)
        _refuse_family(config, name, field)
        return config.to_dict()
    except SettingsError:
        raise
    except (OSError, TypeError, *CONFIG_ERRORS) as error:
        if not isinstance(error, OSError) and (Path(name) / "config.json").is_file():
            raise _bad_config(name, field, error) from error
        raise explain_missing(name, field, ValueError(reason_of(error))) from error


def checked_config(name: str, field: str) -> PretrainedConfig:
    """The config of a folder or of the hub. `check_available` has looked at that of a folder."""
    content, _ = PretrainedConfig.get_config_dict(name)
    if (problem := problem_in(content)) is not None:
        raise SettingsError(f"{field}: config.json of {name!r}: {problem}")
    return AutoConfig.from_pretrained(name, trust_remote_code=False)


def auto_class_of(config: PretrainedConfig) -> Any:
    """The class of transformers that loads the model for text: a causal language model; where config.json names it, or
    there is no other, a language model with a tower for images, so that the whole model is saved again."""
    whole = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    if whole is not None and (not is_causal or whole.__name__ in (config.architectures or ())):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _refuse_family(config: PretrainedConfig, name: str, field: str) -> None:
    if type(config) not in auto_class_of(config)._model_mapping:
        raise SettingsError(
            f"{field}: {name!r} is of the family {config.model_type}, which transformers does not have as a causal "
            "language model; models that need images, sound or an encoder are not supported"
        )
    if config.get_text_config().is_encoder_decoder:
        raise SettingsError(
            f"{field}: {name!r} is of the family {config.model_type}, an encoder and a decoder, of which transformers "
            "would load the decoder alone; models that need an encoder are not supported"
        )


def load_tokenizer(name: str, field: str = "policy.tokenizer.name") -> PreTrainedTokenizerBase:
    check_available(name, field, holding="a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise explain_missing(name, field, error) from error
    except Exception as error:  # valid JSON that is no tokenizer; the library in Rust raises plain Exceptions
        raise SettingsError(
            f"{field}: the tokenizer in {name!r} cannot be read: {type(error).__name__}: {error}; see tokenizer.json "
            "and tokenizer_config.json there"
        ) from error
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"{field}: the tokenizer of {name!r} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    overrides: JsonMapping | None = None,
    *,
    field: str = "policy.model_name",
    trains_tower: bool = False,
) -> PreTrainedModel:
    """`trains_tower`: towers for images and sound are not frozen."""
    check_available(name, field)
    if overrides and (problem := problem_in(overrides)) is not None:
        raise SettingsError(f"policy.hf_config_overrides: {problem}")
    try:
        config = checked_config(name, field)
        _refuse_family(config, name, field)
        model, report = auto_class_of(config).from_pretrained(
            name,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **{**_dequantised(config), **(overrides or {}), "trust_remote_code": False},
        )
    except SettingsError:
        raise
    except OSError as error:
        raise explain_missing(name, field, error) from error
    except pickle.UnpicklingError as error:
        raise SettingsError(f"{field}: {unsafe_pickle(Path(name))}") from error
    except ImportError as error:  # quantized weights need a package per format
        raise SettingsError(f"{field}: {name!r} cannot be loaded here: {reason_of(error)}") from error
    except (TypeError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and (damaged := _damaged_file(Path(name))) is not None:
            raise SettingsError(f"{field}: {damaged} is damaged: {error}") from error
        changed = f" with policy.hf_config_overrides {dict(overrides)}" if overrides else ""
        raise SettingsError(f"{field} {name!r}{changed}: {error}") from error
    except CONFIG_ERRORS as error:
        raise _bad_config(name, field, error, overrides) from error
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):
            raise SettingsError(f"{field}: the weights in {name!r} are damaged: {reason_of(error)}") from error
        if "ignore_mismatched_sizes" not in str(error) and "automatic conversion of the weights" not in str(error):
            raise
        odd = _odd_expert(Path(name))
        raise SettingsError(
            f"{field}: the weights in {name!r} have other shapes than its config.json describes"
            f"{'' if odd is None else f': {odd}'}"
        ) from error
    if "score.weight" in report["unexpected_keys"]:  # with tied embeddings nothing is missing
        raise SettingsError(
            f"{field}: {name!r} is a reward model or classifier: it has score.weight in place of a language model's "
            "output layer. Give the language model"
        )
    if lacking := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise SettingsError(
            f"{field}: {name!r} has no fitting weights for {len(lacking)} parameters ({', '.join(lacking[:3])}, …), "
            "which would start as noise. Is it the whole model, and do policy.hf_config_overrides fit it?"
        )
    if report["unexpected_keys"] and not (dist.is_initialized() and dist.get_rank() > 0):
        unexpected = sorted(report["unexpected_keys"])
        print(
            f"warning: {name!r} holds {len(unexpected)} weights that its config.json does not describe "
            f"({', '.join(unexpected[:3])}{', …' * (len(unexpected) > 3)}), and the model is used without them. Is it "
            "the config of another model?",
            file=sys.stderr,
        )
    model.config.use_cache = False
    sees_images = not refuse_images(config, name)
    _freeze_beside_text(model, trains=trains_tower, sees_images=sees_images, field=field)
    if sees_images:
        add_tower(model, image_tokens(name, config))
    if not _dequantised(config):
        keep_drafts(model, name)
    else:  # what is saved from now on is not quantised
        for owner, attribute in (
            (model.config, "quantization_config"),
            (model, "hf_quantizer"),
            (model, "_weight_conversions"),
        ):
            vars(owner).pop(attribute, None)
    return model.to(device)


def beside_text(model: Any) -> dict[str, nn.Parameter]:
    """Parameters of towers for images and sound, by name: nothing of a text passes through them."""
    if model.config.get_text_config() is model.config:
        return {}
    parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
    text = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in text}


def _freeze_beside_text(model: PreTrainedModel, *, trains: bool, sees_images: bool, field: str) -> None:
    """Towers get no optimizer state, and are saved as they were."""
    beside = beside_text(model)
    if trains and not (beside and sees_images):
        raise SettingsError(f"policy.vision.train_tower: {field} names a model that sees no images here")
    for parameter in beside.values():
        parameter.requires_grad_(trains)
    if beside and not trains and not (dist.is_initialized() and dist.get_rank() > 0):
        parts = sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in beside})
        towers = f"{', '.join(parts)} ({sum(parameter.numel() for parameter in beside.values()):,} weights)"
        used = f"{towers} are" if sees_images else f"used for text alone. {towers} see no images or sound; they are"
        print(f"note: {model.config.model_type}: {used} not trained, and saved as they are", file=sys.stderr)


def expand_images_for(
    name: str, tokenizer: PreTrainedTokenizerBase, field: str = "policy.model_name"
) -> Callable[[str, Sequence[ImageRef]], str] | None:
    """What writes the placeholder tokens of images into a prompt of the model; None for a language model."""
    check_available(name, field)
    config = checked_config(name, field)
    return None if config.get_text_config() is config else expander(name, config, tokenizer)


def _dequantised(config: PretrainedConfig) -> dict[str, object]:
    """Weights in MXFP4 (gpt-oss as published) are trained in the precision of the run."""
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def unsafe_pickle(folder: Path) -> str:
    """What is wrong with weights that torch refuses to load as tensors only."""
    file = next(iter(sorted(folder.glob("*.bin"))), folder)
    return (
        f"{file} is damaged or holds more than tensors, which could run code; not loaded. Where you trust it, save the "
        "weights as safetensors"
    )


def sampling_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return DTYPES["bfloat16" if device.type == "cuda" else "float32"]
    if precision not in DTYPES:
        raise ModelReferenceError(f"precision {precision!r} is not known; accepted: auto, {', '.join(DTYPES)}")
    return DTYPES[precision]


def _bad_config(name: str, field: str, error: Exception, overrides: JsonMapping | None = None) -> SettingsError:
    """The config was read, and no model can be built from it."""
    file = Path(name) / "config.json"
    config = read_json(file, SettingsError) if file.is_file() else {}
    place = str(file) if file.is_file() else repr(name)
    changed = f" with policy.hf_config_overrides {dict(overrides)}" if overrides else ""
    return SettingsError(f"{field}: {place}{changed}: {explain_config_error(error, {**config, **(overrides or {})})}")


def explain_config_error(error: Exception, config: JsonMapping) -> str:
    """Why transformers cannot build a model from `config`, in one line."""
    if isinstance(error, KeyError) and error.args == (ATTENTION,):
        return (
            f"{config.get('model_type')}: its attention has a list of implementations of its own, without posttrain's"
        )
    if isinstance(error, KeyError) and error.args:
        # A look-up by a value of the config, such as the name of an activation. The error holds the value only.
        keys = [key for key, value in config.items() if value == error.args[0]]
        return f"{keys[0]} {error.args[0]!r} is not known to transformers" if keys else f"KeyError: {error}"
    lines = str(error).split("\n")
    if type(error).__name__.startswith("StrictDataclass"):
        # The first line has the field, the second what is wrong with it.
        return " ".join(line.strip() for line in lines)
    first = next((line.strip() for line in lines if line.strip()), "")
    plain = isinstance(error, (ValueError, OSError)) and first
    return first if plain else f"{type(error).__name__}: {first}".removesuffix(": ")


def _damaged_file(folder: Path) -> Path | None:
    """The first weight file that cannot be opened. The error of safetensors does not name it."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return None


def _odd_expert(folder: Path) -> str | None:
    """The first tensor of one expert that is missing or differs from those of the others: transformers names the
    tensor of all experts."""
    stacks: dict[str, dict[int, tuple[int, ...]]] = {}  # shapes by expert, by names without its number
    for file in sorted(folder.glob("*.safetensors")):
        for name, part in stored_parts(file).items():
            if found := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name):
                stacks.setdefault(f"{found[1]}{{}}{found[3]}", {})[int(found[2])] = part.facts.shape
    number = max((index + 1 for shapes in stacks.values() for index in shapes), default=0)
    for name, shapes in sorted(stacks.items()):
        usual = max(shapes.values(), key=list(shapes.values()).count)
        for index in range(number):
            if (shape := shapes.get(index)) != usual:
                found_there = "is missing" if shape is None else f"has the shape {list(shape)}"
                return f"{name.format(index)} {found_there}, and those of other experts have {list(usual)}"
    return None


def experts_per_token(config: PretrainedConfig) -> int:
    """0: there are none, or the config does not say."""
    text = config.get_text_config()
    fields = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_k")
    return next((int(value) for field in fields if (value := getattr(text, field, None))), 0)


def num_experts_in(module: nn.Module) -> int:
    """Of a module that holds the weights of all experts of a layer, stacked; 0: it holds none."""
    sizes = [parameter.shape for parameter in module._parameters.values() if parameter is not None]
    stacked = [int(size[0]) for size in sizes if len(size) == 3 and not isinstance(module, nn.Conv1d)]
    return max(stacked, default=0)


def flops_per_token(model: Any) -> float:
    """Forward and backward pass of one token: six times the weights that it is multiplied with. Attention over short
    contexts is not counted, nor are tables of embeddings, experts that the token does not go to, and towers. `model`
    may have adapters."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    head = base.get_output_embeddings()
    unused = {id(parameter) for parameter in beside_text(base).values()}
    unused |= {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    unused -= {id(getattr(head, "weight", None))}  # tied: the same tensor is multiplied with
    counted, per_token = 0, experts_per_token(base.config)
    for module in base.modules():
        experts = num_experts_in(module) if per_token else 0
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in unused:
                unused.add(id(parameter))  # once
                is_stacked = experts and parameter.shape[0] == experts  # with the biases of experts
                counted += parameter.numel() // experts * per_token if is_stacked else parameter.numel()
    return 6.0 * counted
