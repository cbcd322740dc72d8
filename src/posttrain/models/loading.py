"""Loads the model and its tokenizer, and puts LoRA adapters on it.

`SettingsError` is for what the user can mend: a missing folder, a name the hub does not know, LoRA targets that match
nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import InputError, reason_of
from posttrain.models.config_errors import CONFIG_ERRORS, explain_config_error
from posttrain.models.hub import why_unavailable
from posttrain.policy.attention import ATTENTION

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SettingsError(InputError):
    """The run's settings do not fit the model."""


def resolve_device(setting: str) -> torch.device:
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting == "cuda" and not torch.cuda.is_available():
        raise SettingsError("policy.device is cuda, but torch sees no CUDA device; use cpu or auto")
    return torch.device(setting)


def check_available(name: str, field: str, holding: str = "config.json and weights") -> None:
    """SettingsError, without the pauses of the hub's client, if the name is no folder and the hub cannot help."""
    if (reason := why_unavailable(name, holding)) is not None:
        raise SettingsError(f"{field}: {reason}")


def explain_missing(name: str, field: str, error: Exception) -> SettingsError:
    if Path(name).is_dir():
        return SettingsError(f"{field}: the folder {name!r} is not a Hugging Face model folder: {error}")
    return SettingsError(f"{field}: {name!r} is no local folder and could not be fetched from the hub: {error}")


def check_model_exists(name: str, field: str = "policy.model_name") -> dict[str, Any]:
    """The model's config as a mapping, read without loading weights; SettingsError if there is none."""
    check_available(name, field)
    try:
        return AutoConfig.from_pretrained(name).to_dict()
    except (OSError, *CONFIG_ERRORS) as error:
        if not isinstance(error, OSError) and (Path(name) / "config.json").is_file():
            raise _bad_config(name, field, error) from error
        raise explain_missing(name, field, ValueError(reason_of(error))) from error


def load_tokenizer(name: str, field: str = "policy.tokenizer.name") -> PreTrainedTokenizerBase:
    check_available(name, field, holding="a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise explain_missing(name, field, error) from error
    except (LookupError, TypeError, AttributeError) as error:  # a file that is JSON and no tokenizer
        raise SettingsError(
            f"{field}: the tokenizer in {name!r} cannot be read: {type(error).__name__}: {error}; see tokenizer.json and "
            "tokenizer_config.json there"
        ) from error
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"{field}: the tokenizer of {name!r} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name: str, dtype: torch.dtype, device: torch.device, overrides: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    check_available(name, "policy.model_name")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True, **dict(overrides or {})
        )
    except OSError as error:
        raise explain_missing(name, "policy.model_name", error) from error
    except ImportError as error:  # quantized weights, each kind of which needs a package of its own
        raise SettingsError(f"policy.model_name: {name!r} cannot be loaded here: {reason_of(error)}") from error
    except (TypeError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and (damaged := _damaged_file(Path(name))) is not None:
            raise SettingsError(f"policy.model_name: {damaged} is damaged: {error}") from error
        changed = f" with policy.hf_config_overrides {dict(overrides)}" if overrides else ""
        raise SettingsError(f"policy.model_name {name!r}{changed}: {error}") from error
    except CONFIG_ERRORS as error:
        raise _bad_config(name, "policy.model_name", error, overrides) from error
    if lacking := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise SettingsError(
            f"policy.model_name: {name!r} has no fitting weights for {len(lacking)} parameters ({', '.join(lacking[:3])}, …), "
            "which would start as noise. Is it the whole model, and do policy.hf_config_overrides fit it?"
        )
    if report["unexpected_keys"] and not (dist.is_initialized() and dist.get_rank() > 0):
        strangers = sorted(report["unexpected_keys"])
        print(
            f"warning: {name!r} holds {len(strangers)} weights that its config.json does not know ({', '.join(strangers[:3])}"
            f"{', …' * (len(strangers) > 3)}), and the model is used without them. Is it the config of another model?",
            file=sys.stderr,
        )
    model.config.use_cache = False
    return model.to(device)


def _bad_config(name: str, field: str, error: Exception, overrides: Mapping[str, Any] | None = None) -> SettingsError:
    """The config was read, and no model can be built by it."""
    file = Path(name) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    place = str(file) if file.is_file() else repr(name)
    changed = f" with policy.hf_config_overrides {dict(overrides)}" if overrides else ""
    return SettingsError(f"{field}: {place}{changed}: {explain_config_error(error, {**config, **(overrides or {})})}")


def _damaged_file(folder: Path) -> Path | None:
    """The first weight file that cannot be opened: the error of safetensors does not name it."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return None


def add_lora(model: PreTrainedModel, lora: Any, seed: int, *, task_type: str = "CAUSAL_LM") -> nn.Module:
    """Adapters through peft. `lora` has the keys of `policy.dtensor_cfg.lora_cfg`.

    With the task "SEQ_CLS" the scoring layer of a reward model is trained whole, and saved beside the adapters.
    """
    from peft import LoraConfig, get_peft_model

    targets: str | list[str] = (
        "all-linear" if lora.match_all_linear or not lora.target_modules else list(lora.target_modules)
    )
    config = LoraConfig(
        task_type=task_type,
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=list(lora.exclude_modules) or None,
    )
    torch.manual_seed(seed)  # the adapters' start must not depend on what ran before
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise SettingsError(f"policy.dtensor_cfg.lora_cfg: {error}") from error
    _initialise_adapters(adapted, lora.lora_A_init)
    return adapted


def _initialise_adapters(model: nn.Module, how: str) -> None:
    """peft starts A with Kaiming noise; NeMo RL's default is Xavier. B starts at zero in both."""
    if how == "xavier":
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                nn.init.xavier_normal_(parameter)


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """The frozen base model inside an adapted one."""
    return model.disable_adapter() if is_adapted(model) else nullcontext()  # type: ignore[operator]


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def flops_per_token(model_config: Mapping[str, Any], num_parameters: int) -> float:
    """Forward and backward of one token, the usual 6N; attention over short contexts is left out."""
    embedding = int(model_config.get("vocab_size", 0)) * int(model_config.get("hidden_size", 0))
    tied = bool(model_config.get("tie_word_embeddings", False))
    # A table look-up costs nothing; the output projection does, and when tied it is the same tensor.
    return 6.0 * (num_parameters if tied else num_parameters - embedding)
