"""The policy's part of a checkpoint: what it holds, and how it is written and read. A critic's, in `critic/`, is alike.

policy/model.json            model description, to reject checkpoints of another model
policy/weights/model/        safetensors and config.json: `from_pretrained` loads it (adapters: peft)
policy/optimizer/optim/      torch DCP: optimizer state and fp32 masters, loadable on another number of ranks
policy/optimizer/schedule.pt learning-rate schedule
policy/tokenizer/            the tokenizer, with its chat template

Weights are written tensor by tensor: there is never a second copy of them in memory, and other threads can run
meanwhile, which the `safetensors` library would not allow. Sharded weights are gathered one at a time on every rank,
and written by the first.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from posttrain.checkpointing import CheckpointError, check_same_model, describe_model
from posttrain.checkpointing.dcp_reading import (
    TensorReader,
    load_plain,
    load_tensors,
    silence_dcp_warning,
    tensor_entries,
)
from posttrain.errors import reason_of
from posttrain.files.json_files import read_json
from posttrain.models.draft_layers import add_drafts, drafts_of
from posttrain.models.hub import processor_files
from posttrain.models.lora import is_adapted
from posttrain.models.tensor_files import TensorFacts, plan_shards, write_index, write_safetensors
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer, parameter_of
from posttrain.policy.parallel.fsdp import copy_into, is_first_rank

POLICY, CRITIC = "policy", "critic"  # folders in a checkpoint
WEIGHTS = Path("policy/weights/model")
TOKENIZER = Path("policy/tokenizer")
# In the folder of one model.
_WEIGHTS = Path("weights/model")
_OPTIMIZER = Path("optimizer/optim")
_SCHEDULE = Path("optimizer/schedule.pt")
_TOKENIZER = Path("tokenizer")
_MODEL = Path("model.json")


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
    files: Mapping[str, bytes]  # small files, by their path in the folder of the model
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
    """All that stays the same during a run: configs, tokenizer, description. A large vocabulary takes a second."""
    files = {str(_MODEL): json.dumps(describe(model, tokenizer), indent=2, default=str).encode()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / _WEIGHTS).mkdir(parents=True)
        if is_adapted(model):
            model.peft_config["default"].save_pretrained(str(root / _WEIGHTS))  # type: ignore[index, union-attr]
        else:
            model.save_pretrained(root / _WEIGHTS, state_dict={})  # type: ignore[operator]
            config = base_config(model)
            for file in processor_files(config.name_or_path) if config.get_text_config() is not config else ():
                shutil.copy(file, root / _WEIGHTS)
        for place in (_TOKENIZER, _WEIGHTS):  # also next to the weights, so that the folder is a complete model
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

    return get_peft_model_state_dict(model, state_dict=dict(model.state_dict()), save_embedding_layers=False)


def is_stored_otherwise(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether this family's files have another tensor layout than the model: only `save_pretrained` can write them."""
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


ADAPTERS = "adapter_model.safetensors"
_MAX_FILE_BYTES = 5 * 10**9


def write(
    folder: Path, model: nn.Module, saved: Contents, group: ProcessGroup | None = None, name: str = POLICY
) -> None:
    """Collective. Rank 0 writes unsharded data, each rank its shard of the optimizer.

    `group` is a process group that nothing else uses meanwhile. Tensors are not read from the model: a sharded one
    would reshard its whole parameters for that, and an engine may be sampling with them while a background thread
    writes.
    """
    is_first, folder = is_first_rank(), folder / name
    if is_first:
        for place in (_WEIGHTS, _OPTIMIZER, _TOKENIZER):
            (folder / place).mkdir(parents=True, exist_ok=True)
        for path, content in saved.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    if is_adapted(model):
        write_file(folder / _WEIGHTS / ADAPTERS, saved.weights, is_first_rank=is_first)
    elif saved.stored_otherwise:
        whole = whole_in_host_memory(saved.weights)
        if is_first:
            model.save_pretrained(folder / _WEIGHTS, state_dict=whole, max_shard_size="5GB")  # type: ignore[operator]
    else:
        write_weights(folder / _WEIGHTS, saved.weights, is_first_rank=is_first)
    if is_first and not is_adapted(model) and (drafts := drafts_of(model)):
        add_drafts(folder / _WEIGHTS, drafts)
    if saved.optimizer is None or saved.schedule is None:
        return
    if dist.is_initialized():
        dist.barrier(group)  # the folder exists before other ranks write into it
    # No copies on a stream: tensors are already in host memory, and this thread must not call CUDA.
    writer = dcp.FileSystemWriter(folder / _OPTIMIZER, per_thread_copy_ahead=0)
    silence_dcp_warning()
    tensors = dict(saved.optimizer)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    if is_first:
        (folder / _SCHEDULE).write_bytes(saved.schedule)


def load(
    folder: Path,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: MixedPrecisionOptimizer | None,
    name: str = POLICY,
) -> None:
    folder = folder / name
    if not folder.is_dir():
        raise CheckpointError(f"{folder.parent} holds no {name}: a run without one has saved it; start a new run")
    described = json.loads(json.dumps(describe(model, tokenizer), default=str))
    check_same_model(read_json(folder / _MODEL, CheckpointError), described)
    parameters = dict(model.named_parameters())
    saved_weights = _saved_weights(folder / _WEIGHTS, model)
    if lacking := sorted({name for name, p in parameters.items() if p.requires_grad} - saved_weights.keys()):
        raise CheckpointError(f"{folder}: no weights for {len(lacking)} parameters, among them {lacking[0]}")
    for name, value in saved_weights.items():
        if name in parameters:
            copy_into(parameters[name], value)
    if optimizer is None:
        return
    if not (folder / _OPTIMIZER / ".metadata").exists():
        raise CheckpointError(
            f"{folder}: no optimizer state (it was saved with checkpointing.save_optimizer: false), so training cannot "
            "resume from it exactly. Start a new run from its weights with policy.model_name instead."
        )
    schedule = load_plain(folder / _SCHEDULE)
    optimizer.check_kinds(schedule)
    reader = TensorReader(folder / _OPTIMIZER)
    try:
        entries = tensor_entries(reader.read_metadata())
    except (pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{folder / _OPTIMIZER / '.metadata'} cannot be read: {reason_of(error)}") from error
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}  # once had masters
    saved = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in entries.items()
        if parameter_of(key) not in frozen
    }
    tensors = optimizer.empty_like_saved(saved)
    load_tensors(tensors, reader, no_dist=not dist.is_initialized())
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
    """peft omits the adapter's name in the file. Fully trained modules are stored under a separate name."""
    module, _, parameter = saved.rpartition(".")
    if ".lora_" in saved:
        return f"{module}.default.{parameter}"
    return f"{module}.modules_to_save.default.{parameter}"


# -- safetensors -------------------------------------------------------------------------------------------------------


def write_weights(folder: Path, weights: Mapping[str, Tensor], *, is_first_rank: bool) -> None:
    """`model.safetensors`, or several numbered files and their index where one would be larger than 5 GB."""
    shards = plan_shards({key: _facts(tensor) for key, tensor in weights.items()}, _MAX_FILE_BYTES)
    for name, shard in shards.items():
        write_file(folder / name, {key: weights[key] for key in shard}, is_first_rank=is_first_rank)
    if is_first_rank:
        write_index(folder, shards, total_parameters=sum(tensor.numel() for tensor in weights.values()))


def write_file(file: Path, tensors: Mapping[str, Tensor], *, is_first_rank: bool) -> None:
    whole: Iterable[object] = _in_host_memory(tensors)
    if is_first_rank:
        facts = {name: _facts(tensor) for name, tensor in tensors.items()}
        whole = write_safetensors(file, facts, _in_host_memory(tensors))
    for _ in whole:
        pass


def _in_host_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _facts(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.dtype)


def whole_in_host_memory(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors at once, each with its own memory; a collective if they are sharded."""
    copies = {}
    for name, tensor in _in_host_memory(weights):
        shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        copies[name] = tensor.clone() if shares else tensor
    return copies
