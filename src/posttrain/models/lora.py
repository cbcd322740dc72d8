"""LoRA adapters on a loaded model: new ones for training, and saved ones through peft."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from posttrain.config.policy import LoraConfig
from posttrain.errors import reason_of
from posttrain.models.accepted_names import ModelReferenceError, ResolvedModel
from posttrain.models.loading import SettingsError, beside_text, load_model, unsafe_pickle


def add_lora(
    model: PreTrainedModel,
    lora: LoraConfig,
    seed: int,
    *,
    task_type: str = "CAUSAL_LM",
    adapts_tower: bool = False,
) -> nn.Module:
    """New adapters, made by peft.

    With the task "SEQ_CLS" the scoring layer of a reward model is trained in full and saved with the adapters.
    `adapts_tower`: towers for images get adapters too.
    """
    import peft

    targets: str | list[str] = (
        "all-linear" if lora.match_all_linear or not lora.target_modules else list(lora.target_modules)
    )
    config = peft.LoraConfig(
        task_type=task_type,
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=[
            *lora.exclude_modules,
            *(() if adapts_tower else _linear_layers_beside_text(model)),
            *(_outputs_of_mamba(model) if targets == "all-linear" else ()),
        ]
        or None,
    )
    torch.manual_seed(seed)  # the initial values must not depend on what ran before
    try:
        with _without_remark_on_experts():
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise SettingsError(f"policy.dtensor_cfg.lora_cfg: {error}") from error
    _initialise_adapters(adapted, lora.lora_A_init)
    return adapted


def _linear_layers_beside_text(model: PreTrainedModel) -> list[str]:
    """Modules of a vision tower and its projection."""
    beside = {id(parameter) for parameter in beside_text(model).values()}
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name, module in linear if id(module.weight) in beside]


def _outputs_of_mamba(model: nn.Module) -> list[str]:
    """The kernels of `mamba_ssm`, which transformers uses where they are installed, read these weights without calling
    the module: an adapter would be left out. peft refuses adapters there.
    """
    mixers = [name for name, module in model.named_modules() if {"A_log", "D"} <= module._parameters.keys()]
    return [f"{name}.out_proj" for name in mixers]


@contextmanager
def _without_remark_on_experts() -> Iterator[None]:
    """peft sets patterns of its own for the stacked tensors of experts, applies them, and warns that no module has
    them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (alpha|rank)_pattern keys did not match")
        yield


def _initialise_adapters(model: nn.Module, how: str) -> None:
    """peft initialises A with Kaiming noise, NeMo RL by default with Xavier. B is zero in both."""
    if how == "xavier":
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                nn.init.xavier_normal_(parameter)


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which an adapted model computes the output of its frozen base model."""
    return model.disable_adapter() if is_adapted(model) else nullcontext()  # type: ignore[operator]


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def load_with_adapter(resolved: ResolvedModel, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model, with its adapter if it has one, in evaluation mode and without gradients."""
    try:
        model: nn.Module = load_model(resolved.model, dtype, device)
    except ValueError as error:
        reason = reason_of(error).removeprefix("policy.model_name").lstrip(": ")
        raise ModelReferenceError(f"model {resolved.text!r}: {reason}") from error
    if resolved.adapter is not None:
        model = add_adapter(model, resolved.adapter)
    return model.eval().requires_grad_(False)


def add_adapter(model: nn.Module, adapter: Path, name: str = "default") -> nn.Module:
    """Load a peft adapter onto a base model; ModelReferenceError if the two do not fit."""
    from peft import PeftModel, get_peft_model_state_dict

    device = next(model.parameters()).device
    if not any((adapter / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise ModelReferenceError(f"{adapter} has an adapter_config.json but no weights (adapter_model.safetensors)")
    try:
        with _without_remark_on_experts():
            adapted = PeftModel.from_pretrained(
                model, str(adapter), adapter_name=name, autocast_adapter_dtype=False, torch_device=str(device)
            )
    except SafetensorError as error:
        raise ModelReferenceError(f"{adapter / 'adapter_model.safetensors'} is damaged: {error}") from error
    except pickle.UnpicklingError as error:
        raise ModelReferenceError(unsafe_pickle(adapter)) from error
    except (RuntimeError, ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # torch's first line is only a heading
        raise ModelReferenceError(f"the adapter {adapter} does not fit its base model: {reason}") from error
    file = adapter / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as saved:
            found = set(saved.keys())
        expected = set(get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False))
        # peft may save whole embeddings beside an adapter, and loads them; it skips other unknown weights silently.
        unknown = {key for key in found - expected if "embed" not in key and "lm_head" not in key}
        if unmatched := sorted((expected - found) | unknown):
            raise ModelReferenceError(
                f"the adapter {adapter} does not fit its base model: {len(unmatched)} weights have no counterpart, "
                f"among them {unmatched[0]}"
            )
    return adapted
