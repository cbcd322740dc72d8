"""The policy's part of a checkpoint.

policy/model.json            what the model is, to refuse a checkpoint of another one
policy/weights/model/        safetensors and config.json: `from_pretrained` loads it (adapters: peft)
policy/optimizer/optim/      torch DCP: optimizer state and fp32 masters, loadable on another number of ranks
policy/optimizer/schedule.pt learning-rate schedule
policy/tokenizer/            the tokenizer, with its chat template
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.checkpointing import CheckpointError, check_same_model, describe_model
from posttrain.policy.model import is_adapted
from posttrain.policy.optimizer import MixedPrecisionOptimizer
from posttrain.policy.parallel import copy_into, full_state_dict

WEIGHTS = Path("policy/weights/model")
OPTIMIZER = Path("policy/optimizer/optim")
SCHEDULE = Path("policy/optimizer/schedule.pt")
TOKENIZER = Path("policy/tokenizer")
MODEL = Path("policy/model.json")


def base_config(model: nn.Module) -> PreTrainedConfig:
    return model.get_base_model().config if is_adapted(model) else model.config  # type: ignore[operator]


def describe(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    lora = None
    if is_adapted(model):
        lora = {
            "dim": model.peft_config["default"].r,  # type: ignore[index, union-attr]
            "alpha": model.peft_config["default"].lora_alpha,  # type: ignore[index, union-attr]
            "parameters": sum("lora_" in name for name, _ in model.named_parameters()),
        }
    return describe_model(base_config(model).to_dict(), lora, tokenizer.get_vocab())


def save(
    folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, optimizer: MixedPrecisionOptimizer | None
) -> None:
    """Every rank calls this; rank 0 writes what is whole, each rank its shard of the optimizer."""
    state = full_state_dict(model)
    if _is_first_rank():
        for name in (WEIGHTS, OPTIMIZER, TOKENIZER):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if is_adapted(model):
            from peft import get_peft_model_state_dict

            state = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
            _save_adapters(folder / WEIGHTS, model, state)
        else:
            model.save_pretrained(folder / WEIGHTS, state_dict=state)  # type: ignore[operator]
        for place in (TOKENIZER, WEIGHTS):  # beside the weights too, so that the folder is a whole model
            tokenizer.save_pretrained(folder / place)
        (folder / MODEL).write_text(json.dumps(describe(model, tokenizer), indent=2, default=str))
    if optimizer is None:
        return
    if dist.is_initialized():
        dist.barrier()  # the folder exists before other ranks write into it
    with _without_single_process_warning():
        dcp.save(optimizer.state_tensors(), checkpoint_id=folder / OPTIMIZER, no_dist=not dist.is_initialized())
    if _is_first_rank():
        torch.save(optimizer.schedule_state(), folder / SCHEDULE)


def _save_adapters(folder: Path, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))  # type: ignore[index, union-attr]


def load(
    folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, optimizer: MixedPrecisionOptimizer | None
) -> None:
    check_same_model(
        json.loads((folder / MODEL).read_text()), json.loads(json.dumps(describe(model, tokenizer), default=str))
    )
    parameters = dict(model.named_parameters())
    saved_weights = _saved_weights(folder / WEIGHTS, model)
    if lacking := sorted({name for name, p in parameters.items() if p.requires_grad} - saved_weights.keys()):
        raise CheckpointError(f"{folder}: no weights for {len(lacking)} parameters, among them {lacking[0]}")
    for name, value in saved_weights.items():
        if name in parameters:
            copy_into(parameters[name], value)
    if optimizer is None:
        return
    if not (folder / OPTIMIZER / ".metadata").exists():
        raise CheckpointError(
            f"{folder}: no optimizer state (it was saved with checkpointing.save_optimizer: false), so training cannot go on "
            "from it exactly. Start a new run from its weights with policy.model_name instead."
        )
    schedule = torch.load(folder / SCHEDULE, weights_only=True)
    optimizer.check_kinds(schedule)
    reader = dcp.FileSystemReader(folder / OPTIMIZER)
    saved = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    tensors: dict[str, Any] = dict(optimizer.empty_like_saved(saved))
    with _without_single_process_warning():
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    optimizer.load_state_tensors(tensors)
    optimizer.load_schedule_state(schedule)


def _saved_weights(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """By the names that the parameters have in `model`."""
    if is_adapted(model):
        from safetensors.torch import load_file

        saved = load_file(folder / "adapter_model.safetensors")
        return {_adapted_name(name): value for name, value in saved.items()}
    kind: Any = type(model)  # a language model or a reward model
    whole = kind.from_pretrained(folder, dtype=next(model.parameters()).dtype)
    return dict(whole.named_parameters())


def _adapted_name(saved: str) -> str:
    """peft leaves the adapter's name out of the file. Modules that are trained whole lie under a name of their own."""
    module, _, parameter = saved.rpartition(".")
    if ".lora_" in saved:
        return f"{module}.default.{parameter}"
    return f"{module}.modules_to_save.default.{parameter}"


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """DCP warns when there is no process group, also when it is told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
