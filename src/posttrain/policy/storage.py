"""The policy's part of a checkpoint.

policy/model.json            what the model is, to refuse a checkpoint of another one
policy/weights/model/        safetensors and config.json: `from_pretrained` loads it (adapters: peft)
policy/optimizer/optim/      torch DCP: optimizer state and fp32 masters, loadable on another number of ranks
policy/optimizer/schedule.pt learning-rate schedule
policy/tokenizer/            the tokenizer, with its chat template
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.checkpointing import CheckpointError, check_same_model, describe_model
from posttrain.models.lora import is_adapted
from posttrain.policy.optimizer import MixedPrecisionOptimizer
from posttrain.policy.parallel import copy_into
from posttrain.policy.weight_files import (
    ADAPTERS,
    is_stored_otherwise,
    named_adapters,
    named_weights,
    whole_in_host_memory,
    write_file,
    write_weights,
)

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


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds of the policy. Tensors may be on a device, in host memory, or this rank's part of sharded ones."""

    weights: Mapping[str, Tensor]  # by their names in the file
    optimizer: Mapping[str, Tensor] | None
    schedule: bytes | None
    files: Mapping[str, bytes]  # small files, by their path in the checkpoint
    stored_otherwise: bool  # the family's files hold other tensors than the model does


def contents(model: nn.Module, optimizer: MixedPrecisionOptimizer | None, files: Mapping[str, bytes]) -> Contents:
    """The state as it is now; tensors are named, not copied. `files` come from `small_files`."""
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
    """Everything that stays the same during a run: configs, tokenizer, description. A large vocabulary takes a second."""
    files = {str(MODEL): json.dumps(describe(model, tokenizer), indent=2, default=str).encode()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / WEIGHTS).mkdir(parents=True)
        if is_adapted(model):
            model.peft_config["default"].save_pretrained(str(root / WEIGHTS))  # type: ignore[index, union-attr]
        else:
            model.save_pretrained(root / WEIGHTS, state_dict={})  # type: ignore[operator]
        for place in (TOKENIZER, WEIGHTS):  # beside the weights too, so that the folder is a whole model
            tokenizer.save_pretrained(root / place)
        for path in root.rglob("*"):
            if path.is_file():
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def write(folder: Path, model: nn.Module, saved: Contents, group: Any = None) -> None:
    """Every rank calls this; rank 0 writes what is whole, each rank its shard of the optimizer.

    `group` is a process group that nobody else uses meanwhile. The model is not asked for its tensors: a sharded one would
    give its whole parameters up for that, and in the background somebody may be sampling with them.
    """
    is_first = is_first_rank()
    if is_first:
        for name in (WEIGHTS, OPTIMIZER, TOKENIZER):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path, content in saved.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    if is_adapted(model):
        write_file(folder / WEIGHTS / ADAPTERS, saved.weights, is_first_rank=is_first)
    elif saved.stored_otherwise:
        whole = whole_in_host_memory(saved.weights)
        if is_first:
            model.save_pretrained(folder / WEIGHTS, state_dict=whole, max_shard_size="5GB")  # type: ignore[operator]
    else:
        write_weights(folder / WEIGHTS, saved.weights, is_first_rank=is_first)
    if saved.optimizer is None or saved.schedule is None:
        return
    if dist.is_initialized():
        dist.barrier(group)  # the folder exists before other ranks write into it
    # Nothing is copied ahead on a stream: in the background there is nothing to copy, and CUDA is not ours to call.
    writer = dcp.FileSystemWriter(folder / OPTIMIZER, per_thread_copy_ahead=0)
    _say_nothing_of_one_process()
    tensors = dict(saved.optimizer)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    if is_first:
        (folder / SCHEDULE).write_bytes(saved.schedule)


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
    _say_nothing_of_one_process()
    dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    optimizer.load_state_tensors(tensors)
    optimizer.load_schedule_state(schedule)


def _saved_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """By the names that the parameters have in `model`."""
    if is_adapted(model):
        from safetensors.torch import load_file

        saved = load_file(folder / ADAPTERS)
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


def _say_nothing_of_one_process() -> None:
    """DCP warns when there is no process group, also when it is told so. Filters are global: no thread may put them back."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
