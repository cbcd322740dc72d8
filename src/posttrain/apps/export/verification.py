"""Compares the logits of the converted model with those of its source, on tokens spread over the vocabulary.

The source is run *streamed*: the weights of a module are read before its forward pass and dropped after it, so that one
module is in memory at a time. An adapter is applied as in training, next to the layer and not merged, so that an error
in merging is detected. The converted folder is loaded by transformers (and peft), as its users will load it. If the
memory is too small for that, it is run streamed as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from posttrain.apps.export.merge_lora import Adapter
from posttrain.apps.export.weight_names import WeightShapes, config_file_of, empty_model
from posttrain.apps.export.weight_sources import WeightSource
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject
from posttrain.models.loading import auto_class_of, explain_config_error
from posttrain.policy.host_memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig, PreTrainedModel

_NUM_TOKENS = 24
_ROOM = 1.3  # memory of a loaded model over that of its weights
_EXACT = 1e-3  # of the logits' standard deviation: the order of sums may differ, nothing else
_ROUNDED = 0.1  # where weights were rounded to 16 bits on the way


@dataclass(frozen=True)
class Verification:
    how: Literal["loaded", "streamed"]
    max_difference: float  # of any logit
    spread: float  # standard deviation of the source's logits
    tolerance: float  # accepted difference, in units of the spread
    num_same_top: int  # tokens whose most likely successor is the same; all for a reward model
    adapter_effect: float | None = None  # largest change of a logit that the adapter makes

    def __str__(self) -> str:
        top = f"the most likely token is the same at {self.num_same_top} of {_NUM_TOKENS} positions"
        if self.tolerance == _EXACT:
            return f"its logits equal the source's within {self.max_difference:.2g}; {top}"
        bound = f"where rounding to 16 bits may change them by up to {self.tolerance * self.spread:.2g}"
        return f"{top}; its logits differ from the source's by at most {self.max_difference:.2g}, {bound}"

    @property
    def drowns_adapter(self) -> bool:
        """Rounding the merged weights changed the logits by more than half of the adapter's effect."""
        return self.adapter_effect is not None and self.max_difference > 0.5 * self.adapter_effect > 0

    def as_json(self) -> JsonObject:
        return {
            "how": self.how,
            "max_logit_difference": self.max_difference,
            "logit_standard_deviation": self.spread,
            "num_tokens": _NUM_TOKENS,
            "num_same_top": self.num_same_top,
            **({} if self.adapter_effect is None else {"adapter_effect": self.adapter_effect}),
        }


def compare(
    reference: Tensor,
    found: Tensor,
    *,
    how: Literal["loaded", "streamed"],
    rounded: bool,
    without_adapter: Tensor | None,
) -> Verification:
    """InputError unless the two agree."""
    if not torch.isfinite(reference).all():
        raise InputError("the source model's logits are not finite: its weights overflow, so it is unusable")
    difference = float((reference - found).abs().max())
    # A reward model gives one number, which has no deviation.
    spread = max(float(reference.std() if reference.numel() > 1 else reference.abs().max()), 1e-6)
    tolerance = _ROUNDED if rounded else _EXACT
    if not math.isfinite(difference) or difference > tolerance * spread:
        raise InputError(
            f"the converted model's logits differ from the source's by up to {difference:.3g}, where "
            f"{tolerance * spread:.3g} is accepted; nothing was written"
        )
    effect = None if without_adapter is None else float((reference - without_adapter).abs().max())
    is_same = reference.argmax(-1) == found.argmax(-1)
    same_top = int(is_same.sum()) if is_same.numel() == _NUM_TOKENS else _NUM_TOKENS
    return Verification(how, difference, spread, tolerance, same_top, effect)


def probe_tokens(config: PretrainedConfig) -> Tensor:
    """Token ids from all over the vocabulary, its first and last included."""
    size = int(config.get_text_config().vocab_size)
    return torch.linspace(0, size - 1, _NUM_TOKENS).round().long()[None]


@torch.no_grad()
def streamed_logits(shape: WeightShapes, weights: WeightSource, adapter: Adapter | None = None) -> Tensor:
    """The model's logits in float32, with one module's weights in memory at a time."""
    model = empty_model(shape.config, shape.model_class)
    adapted = set(adapter.modules) if adapter else set()
    # A model with towers around its language model may read single rows of the embedding, and moves its inputs to the
    # device of its first parameter.
    has_towers = shape.config.get_text_config() is not shape.config
    embedding = model.get_input_embeddings() if has_towers else None  # type: ignore[operator]
    first = next(module for module in model.modules() if module._parameters) if has_towers else None
    for path, module in model.named_modules():
        if module._parameters:
            prefix = f"{path}." if path else ""
            names = {own: shape.tied.get(full := f"{prefix}{own}", full) for own in module._parameters}
            # A convolution is not called: its parent passes the weights to a function.
            caller = model.get_submodule(path.rpartition(".")[0]) if isinstance(module, nn.Conv1d) else module
            caller = model if module in (embedding, first) else caller
            caller.register_forward_pre_hook(_fill(module, weights, adapter, names))
        if adapter is not None and path in adapted:
            module.register_forward_hook(_add_adapter(adapter, path))
        if module._parameters:
            caller.register_forward_hook(_empty(module))
    return _logits(model, shape)


def _fill(
    module: nn.Module, weights: WeightSource, adapter: Adapter | None, names: Mapping[str, str]
) -> Callable[[nn.Module, object], None]:
    whole = adapter.whole.facts if adapter is not None else {}

    def before(_module: nn.Module, _: object) -> None:
        for own, full in names.items():
            if module._parameters[own] is None:
                continue
            source = adapter.whole if adapter is not None and full in whole else weights
            ((_, tensor),) = source.read([full])
            module._parameters[own] = nn.Parameter(tensor.float(), requires_grad=False)

    return before


def _empty(module: nn.Module) -> Callable[..., None]:
    def after(*_: object) -> None:
        for own, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    return after


def _add_adapter(adapter: Adapter, module_path: str) -> Any:
    def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        a, b = adapter.read_factors(module_path)
        return output + (inputs[0].float() @ a.T) @ b.T * adapter.scale(module_path)

    return after


@torch.no_grad()
def loaded_logits(folder: Path, shape: WeightShapes, adapter_folder: Path | None = None) -> Tensor:
    """The logits of a Hugging Face folder, loaded as its users load it; with an adapter, through peft."""
    what = "the converted folder" if adapter_folder is None else f"the base model {folder}"
    try:
        model, report = _loader(shape).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # any error here would also be raised for the folder's users
        raise InputError(f"transformers cannot load {what}: {reason_of(error)}") from error
    wrong = [*map(str, report["missing_keys"]), *map(str, report["mismatched_keys"]), *report["unexpected_keys"]]
    if wrong:
        raise InputError(
            f"transformers finds {len(wrong)} weights of {what} missing, unexpected or of another shape, "
            f"among them {sorted(wrong)[0]}"
        )
    if adapter_folder is not None:
        from posttrain.models.lora import add_adapter

        model = add_adapter(model, adapter_folder)
    return _logits(model.eval(), shape)


def _loader(shape: WeightShapes) -> Any:
    """The class that users load such a model with. It follows the folder's model_type, so a wrong one is detected
    here."""
    from transformers import AutoModelForSequenceClassification

    def task(model_class: type[PreTrainedModel]) -> str:
        return str(model_class.__name__).rpartition("For")[2]

    for auto_class in (auto_class_of(shape.config), AutoModelForSequenceClassification):
        usual = auto_class._model_mapping.get(type(shape.config), None)
        if usual is not None and task(usual) == task(shape.model_class):
            return auto_class
    return shape.model_class


def _logits(model: nn.Module, shape: WeightShapes) -> Tensor:
    try:
        logits: Tensor = model(input_ids=probe_tokens(shape.config), use_cache=False).logits
    except InputError:
        raise  # a weight file that cannot be read
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = explain_config_error(error, shape.config.to_dict())
        raise InputError(
            f"{config_file_of(shape.origin)}: the model that it describes does not run: {reason}"
        ) from error
    return logits.float()


def fits_into_memory(shape: WeightShapes) -> bool:
    """Whether the model can be loaded whole in float32 now."""
    needed = 4 * _ROOM * sum(math.prod(size) for size in shape.shapes.values())
    return needed < available_bytes()
