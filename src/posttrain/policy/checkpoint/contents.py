"""What a checkpoint holds of the policy: weights by their names in the file, optimizer state, schedule, small files.

policy/model.json            model description, to reject checkpoints of another model
policy/weights/model/        safetensors and config.json: `from_pretrained` loads it (adapters: peft)
policy/optimizer/optim/      torch DCP: optimizer state and fp32 masters, loadable on another number of ranks
policy/optimizer/schedule.pt learning-rate schedule
policy/tokenizer/            the tokenizer, with its chat template
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.checkpointing import describe_model
from posttrain.models.lora import is_adapted
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer

WEIGHTS = Path("policy/weights/model")
OPTIMIZER = Path("policy/optimizer/optim")
SCHEDULE = Path("policy/optimizer/schedule.pt")
TOKENIZER = Path("policy/tokenizer")
MODEL = Path("policy/model.json")


def base_config(model: nn.Module) -> PreTrainedConfig:
    return model.get_base_model().config if is_adapted(model) else model.config  # type: ignore[operator]


def describe(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    lora = None
    if is_adapted(model):
        lora = {
            "dim": model.peft_config["default"].r,  # type: ignore[index, union-attr]
            "alpha": model.peft_config["default"].lora_alpha,  # type: ignore[index, union-attr]
            "parameters": sum("lora_" in name for name, _ in model.named_parameters()),
        }
    return describe_model(base_config(model).to_dict(), lora, tokenizer.get_vocab())


@dataclass(frozen=True)
class Contents:
    """The policy's part of a checkpoint. Tensors may be on a device, in host memory, or this rank's shards."""

    weights: Mapping[str, Tensor]  # by their names in the file
    optimizer: Mapping[str, Tensor] | None
    schedule: bytes | None
    files: Mapping[str, bytes]  # small files, by their path in the checkpoint
    stored_otherwise: bool  # the family's files have a different tensor layout than the model


def state_of(model: nn.Module, optimizer: MixedPrecisionOptimizer | None, files: Mapping[str, bytes]) -> Contents:
    """The current state; tensors are referenced, not copied. `files` come from `small_files`."""
    schedule = None
    if optimizer is not None:
        buffer = io.BytesIO()
        torch.save(optimizer.schedule_state(), buffer)
        schedule = buffer.getvalue()
    adapted = is_adapted(model)
    weights = named_adapters(model) if adapted else named_weights(model)
    states = optimizer.state_tensors() if optimizer is not None else None
    return Contents(weights, states, schedule, files, not adapted and is_stored_otherwise(model, weights))


def small_files(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Everything that stays the same during a run: configs, tokenizer, description. A large vocabulary
    takes a second.
    """
    files = {str(MODEL): json.dumps(describe(model, tokenizer), indent=2, default=str).encode()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / WEIGHTS).mkdir(parents=True)
        if is_adapted(model):
            model.peft_config["default"].save_pretrained(str(root / WEIGHTS))  # type: ignore[index, union-attr]
        else:
            model.save_pretrained(root / WEIGHTS, state_dict={})  # type: ignore[operator]
        for place in (TOKENIZER, WEIGHTS):  # also next to the weights, so that the folder is a complete model
            tokenizer.save_pretrained(root / place)
        for path in root.rglob("*"):
            if path.is_file():
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the file, tied ones once. Nothing is copied."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def named_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that peft saves of an adapted model, under peft's names."""
    from peft import get_peft_model_state_dict

    adapters: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(model.state_dict()), save_embedding_layers=False
    )
    return adapters


def is_stored_otherwise(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether this family's files have a different tensor layout than the model, so that only `save_pretrained` can
    write them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights.items()}
    try:
        stored = revert_weight_conversion(model, dict(shapes))
    except Exception:  # it needs the values of the tensors
        return True
    return {name: t.shape for name, t in stored.items()} != {name: t.shape for name, t in shapes.items()}


class KeptGenerationConfig(GenerationConfig):
    """Generation settings that are saved as they were loaded.

    Many models set a temperature without `do_sample`. transformers loads that with a warning and refuses to save it, so
    a run would fail at its first checkpoint. The settings are kept unchanged.
    """

    @classmethod
    def copy_of(cls, config: GenerationConfig) -> KeptGenerationConfig:
        kept = cls.__new__(cls)
        kept.__dict__.update(config.__dict__)
        return kept

    def validate(self, strict: bool = False, **details: object) -> None:
        if not strict:  # only saving is strict
            super().validate(**details)


def keep_generation_config(model: nn.Module) -> None:
    """Allow saving the model with its original generation settings; some model types have none."""
    if isinstance(getattr(model, "generation_config", None), GenerationConfig):
        model.generation_config = KeptGenerationConfig.copy_of(model.generation_config)
