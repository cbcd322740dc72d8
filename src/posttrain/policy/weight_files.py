"""The weights of a model as safetensors files that `from_pretrained` loads, written tensor by tensor.

There is never a second copy of the weights in memory, and other threads can run meanwhile: writing a file lets them, the
`safetensors` library would not. Sharded weights are gathered one at a time on every rank, and written by the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.models.tensor_files import TensorFacts, write_safetensors

ADAPTERS = "adapter_model.safetensors"
_MAX_FILE_BYTES = 5 * 10**9


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the file, those that are one and the same once. Nothing is copied."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def named_adapters(model: nn.Module) -> dict[str, Tensor]:
    """What peft saves of an adapted model, by its names."""
    from peft import get_peft_model_state_dict

    adapters: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(model.state_dict()), save_embedding_layers=False
    )
    return adapters


def is_stored_otherwise(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether the files of this family hold other tensors than the model does, so that only `save_pretrained` can write them."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights.items()}
    try:
        stored = revert_weight_conversion(model, dict(shapes))
    except Exception:  # something that needs the numbers: not for us
        return True
    return {name: t.shape for name, t in stored.items()} != {name: t.shape for name, t in shapes.items()}


def write_weights(folder: Path, weights: Mapping[str, Tensor], *, is_first_rank: bool) -> None:
    """`model.safetensors`, or several numbered files and their index where one would be larger than 5 GB."""
    groups = _files(weights)
    names = [
        "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    for name, keys in zip(names, groups, strict=True):
        write_file(folder / name, {key: weights[key] for key in keys}, is_first_rank=is_first_rank)
    if len(groups) > 1 and is_first_rank:
        index = {
            "metadata": {
                "total_parameters": sum(tensor.numel() for tensor in weights.values()),
                "total_size": sum(_facts(tensor).num_bytes for tensor in weights.values()),
            },
            "weight_map": {key: name for name, keys in zip(names, groups, strict=True) for key in keys},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(file: Path, tensors: Mapping[str, Tensor], *, is_first_rank: bool) -> None:
    whole = _in_host_memory(tensors)
    if is_first_rank:
        for _ in write_safetensors(file, {name: _facts(tensor) for name, tensor in tensors.items()}, whole):
            pass
    else:
        for _ in whole:
            pass


def _in_host_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _facts(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.dtype)


def _files(weights: Mapping[str, Tensor]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        num_bytes = _facts(tensor).num_bytes
        if groups[-1] and size + num_bytes > _MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups


def whole_in_host_memory(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of them at once, each with memory of its own; a collective where they are sharded."""
    copies = {}
    for name, tensor in _in_host_memory(weights):
        shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        copies[name] = tensor.clone() if shares else tensor
    return copies
