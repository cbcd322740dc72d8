"""Safetensors files, read and written one tensor at a time, so that a model larger than the memory can be processed.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, a JSON header with type, shape
and place of every tensor, then the data. A file may hold parts of tensors, as sharded training writes them: the header
then holds the offsets of the part in the whole tensor (`DCP_SHARDING_INFO`, as torch.distributed.checkpoint writes it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from posttrain.errors import InputError
from posttrain.files.json_files import parse_json

DTYPE_OF_CODE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_SHARDING = "DCP_SHARDING_INFO"
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class TensorFacts:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredPart:
    """A tensor in a file, or a part of one: `offsets` are where it begins in the whole."""

    file: Path
    begin: int  # byte in the file
    facts: TensorFacts
    offsets: tuple[int, ...]

    def read(self) -> Tensor:
        buffer = torch.empty(self.facts.num_bytes, dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.begin)
            view = memoryview(buffer.numpy().data)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise InputError(f"{self.file} ends in the middle of its data: it was cut short")
                view = view[count:]
        return buffer.view(self.facts.dtype).reshape(self.facts.shape)


def stored_parts(file: Path) -> dict[str, StoredPart]:
    """The entries of a safetensors file, by name. The data is not read, but must be complete."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header is not a safetensors header")
            header = parse_json(stream.read(length))
        sharding = parse_json(header.pop("__metadata__", {}).get(_SHARDING, "{}"))
        parts = {}
        for name, entry in header.items():
            facts = TensorFacts(tuple(entry["shape"]), DTYPE_OF_CODE[entry["dtype"]])
            begin, end = entry["data_offsets"]
            if end - begin != facts.num_bytes or 8 + length + end > size:
                raise ValueError(f"the data of {name} is not all there: the file has {size} bytes")
            offsets = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(facts.shape)
            parts[name] = StoredPart(file, 8 + length + begin, facts, offsets)
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} cannot be read as safetensors: {error}") from error
    return parts


def assemble(name: str, parts: list[StoredPart], facts: TensorFacts) -> Tensor:
    """The whole tensor from its parts."""
    if len(parts) == 1 and parts[0].facts.shape == facts.shape:
        return parts[0].read()
    whole = torch.empty(facts.shape, dtype=facts.dtype)
    for part in parts:
        place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.facts.shape, strict=True))
        whole[place] = part.read()
    return whole


def whole_facts(name: str, parts: list[StoredPart]) -> TensorFacts:
    """Shape and type of the tensor that the parts make up; InputError if a part is missing."""
    first = parts[0].facts
    if any(p.facts.dtype != first.dtype or len(p.facts.shape) != len(first.shape) for p in parts):
        raise InputError(f"{name}: the parts in {_files(parts)} are of different types or ranks")
    ends = zip(*[[o + n for o, n in zip(p.offsets, p.facts.shape, strict=True)] for p in parts], strict=True)
    shape = tuple(max(axis) for axis in ends)
    covered = sum(math.prod(part.facts.shape) for part in parts)
    if covered < math.prod(shape):
        raise InputError(
            f"{name}: {_files(parts)} hold {covered} of its {math.prod(shape)} numbers; a shard is missing"
        )
    return TensorFacts(shape, first.dtype)


def _files(parts: list[StoredPart]) -> str:
    names = sorted({part.file.name for part in parts})
    return f"{parts[0].file.parent}/{names[0]}" + (f" … {names[-1]}" if len(names) > 1 else "")


def in_batches(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The names in order, in batches of at most `max_bytes`; a larger tensor gets its own batch."""
    batches: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if batches[-1] and total + size > max_bytes:
            batches.append([])
            total = 0
        batches[-1].append(name)
        total += size
    return batches


def plan_shards(plan: Mapping[str, TensorFacts], max_bytes: int) -> dict[str, dict[str, TensorFacts]]:
    """The files of a model and the tensors in each, in order: `model.safetensors`, or several that are numbered. A
    tensor is never cut, so one that is larger has a file of its own."""
    groups = in_batches({name: facts.num_bytes for name, facts in plan.items()}, max_bytes)
    ends = [""] if len(groups) == 1 else [f"-{n:05d}-of-{len(groups):05d}" for n in range(1, len(groups) + 1)]
    shards = zip(ends, groups, strict=True)
    return {f"model{end}.safetensors": {name: plan[name] for name in group} for end, group in shards}


def write_index(folder: Path, shards: Mapping[str, Mapping[str, TensorFacts]], **metadata: int) -> None:
    """`model.safetensors.index.json`, unless the model is one file."""
    if len(shards) == 1:
        return
    total = sum(facts.num_bytes for shard in shards.values() for facts in shard.values())
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_safetensors(
    file: Path, plan: Mapping[str, TensorFacts], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[int]:
    """Write the tensors of `plan`, which come in its order. Yields the number of bytes written after each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, facts in plan.items():
        shape, end = list(facts.shape), at + facts.num_bytes
        header[name] = {"dtype": CODE_OF_DTYPE[facts.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for (name, facts), (given, tensor) in zip(plan.items(), tensors, strict=True):
            assert name == given, f"{given} came where {name} was planned"
            assert (tuple(tensor.shape), tensor.dtype) == (facts.shape, facts.dtype), name
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            yield facts.num_bytes
