"""LoRA adapters as models of their own: one base model in memory, and a switch that says which adapter is on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from posttrain.errors import reason_of
from posttrain.models.accepted_names import ModelReferenceError, read_json
from posttrain.models.lora import add_adapter

_OWN = "default"  # peft's name of an adapter that belongs to the main model


class AdapterSwitch:
    """Puts adapters on a model and turns one of them on. "" is the model as it was: bare, or with an adapter of its own."""

    def __init__(self, adapters: Mapping[str, Path]) -> None:
        self._adapters = dict(adapters)
        self._peft_name: dict[str, str | None] = {}
        self.model: Any = None

    def put_on(self, model: nn.Module) -> nn.Module:
        """All adapters on the model; call it before an engine looks at the modules."""
        self._peft_name = {"": _OWN if hasattr(model, "peft_config") else None}
        self.model = model
        for index, (name, folder) in enumerate(self._adapters.items()):
            _check_bias(name, folder)
            peft_name = f"adapter{index}"  # users may write dots, peft may not
            if hasattr(self.model, "peft_config"):
                _load_beside(self.model, name, folder, peft_name)
            else:
                self.model = add_adapter(self.model, folder, peft_name)
            self._peft_name[name] = peft_name
        adapted: nn.Module = self.model.eval().requires_grad_(False)
        return adapted

    def activate(self, name: str) -> None:
        peft_name = self._peft_name[name]
        tuner = getattr(self.model, "base_model", None)
        if not hasattr(self.model, "peft_config") or tuner is None:
            return
        if peft_name is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            tuner.set_adapter(peft_name, inference_mode=True)


def _load_beside(model: Any, name: str, folder: Path, peft_name: str) -> None:
    device = next(model.parameters()).device
    try:
        result = model.load_adapter(
            str(folder), adapter_name=peft_name, autocast_adapter_dtype=False, torch_device=str(device)
        )
    except (RuntimeError, ValueError, OSError, KeyError, TypeError) as error:
        raise ModelReferenceError(
            f"adapter {name!r}: {folder} does not fit the base model: {reason_of(error)}"
        ) from error
    lacking = [key for key in result.missing_keys if f".{peft_name}." in key]
    if strange := [*lacking, *result.unexpected_keys]:
        raise ModelReferenceError(
            f"adapter {name!r}: {folder} does not fit the base model: {len(strange)} weights have no partner, "
            f"among them {strange[0]}"
        )


def _check_bias(name: str, folder: Path) -> None:
    """Trained biases stay in the model when an adapter is switched off: the others would not be themselves any more."""
    bias = read_json(folder / "adapter_config.json").get("bias", "none")
    if bias != "none":
        raise ModelReferenceError(
            f"adapter {name!r} was trained with bias={bias!r} and cannot be switched off exactly; merge it into its base "
            "model (posttrain convert --merge-lora) and serve that"
        )
