"""Weight files of several formats behind one interface. One tensor, or a few, are read at a time.

Which names a model needs is decided in `weight_names.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from posttrain.errors import InputError
from posttrain.models.accepted_names import files_of_index
from posttrain.models.tensor_files import StoredPart, TensorFacts, assemble, in_batches, stored_parts, whole_facts

_READ_TOGETHER_BYTES = 256 * 2**20  # a read of DCP looks through its whole index, so small tensors are read together
_SHARD_NUMBER = re.compile(r"shard-(\d+)-")


class WeightSource(Protocol):
    place: Path  # for messages
    facts: Mapping[str, TensorFacts]  # every tensor, by name

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the order of `names`, whole, each to be dropped before the next is read."""
        ...

    def where(self, name: str) -> str:
        """The file or files of a tensor, for messages."""
        ...


class SafetensorsSource:
    """Safetensors files of one folder: a Hugging Face model in one file or several, or parts as sharded training saves
    them."""

    def __init__(self, place: Path, files: Sequence[Path] | None = None) -> None:
        self.place = place
        self._parts: dict[str, list[StoredPart]] = {}
        for file in files or _files_of(place):
            for name, part in stored_parts(file).items():
                known = self._parts.setdefault(name, [])
                if all(part.offsets != other.offsets for other in known):  # replicas need to be read once
                    known.append(part)
        self.facts: Mapping[str, TensorFacts] = {name: whole_facts(name, p) for name, p in self._parts.items()}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, assemble(name, self._parts[name], self.facts[name])

    def where(self, name: str) -> str:
        return ", ".join(sorted({str(part.file) for part in self._parts[name]}))


def _files_of(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = files_of_index(index)
        if lacking := [name for name in names if not (folder / name).is_file()]:
            raise InputError(f"{folder}: {index.name} names {len(names)} files, and {', '.join(lacking)} is missing")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} holds no safetensors files")
    numbers = {int(match[1]) for file in files if (match := _SHARD_NUMBER.match(file.name))}
    if numbers and (lacking_numbers := sorted(set(range(1, max(numbers) + 1)) - numbers)):
        raise InputError(
            f"{folder}: shard {lacking_numbers[0]} of at least {max(numbers)} is missing "
            f"(shard-{lacking_numbers[0]:05d}-…)"
        )
    return files


class DcpSource:
    """A folder of torch.distributed.checkpoint: `.metadata` and any number of `__rank_n.distcp` files."""

    def __init__(self, place: Path) -> None:
        from posttrain.checkpointing.dcp_reading import TensorReader, tensor_entries

        self.place = place
        try:
            self._metadata = TensorReader(place).read_metadata()
        except Exception as error:  # a pickle can fail with anything
            raise InputError(f"{place / '.metadata'} cannot be read: {error}") from error
        self.facts: Mapping[str, TensorFacts] = {
            name: TensorFacts(tuple(entry.size), entry.properties.dtype)
            for name, entry in tensor_entries(self._metadata).items()
        }
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
        for name, end in sorted(ends.items()):
            file = self.place / name
            if not file.is_file():
                raise InputError(f"{file} is missing: it is one of the {len(ends)} shards that .metadata names")
            if file.stat().st_size < end:
                raise InputError(f"{file} was cut short: {file.stat().st_size} bytes instead of at least {end}")

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for group in in_batches({name: self.facts[name].num_bytes for name in names}, _READ_TOGETHER_BYTES):
            yield from self._load(group)

    def _load(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        from posttrain.checkpointing.dcp_reading import TensorReader, load_tensors

        if not names:
            return
        tensors = {name: torch.empty(self.facts[name].shape, dtype=self.facts[name].dtype) for name in names}
        try:
            load_tensors(tensors, TensorReader(self.place), no_dist=True)
        except Exception as error:  # damaged pickles and archives fail with anything
            first = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise InputError(f"{self.place}: reading {names[0]} … {names[-1]} failed: {first[0]}") from error
        for name in names:
            yield name, tensors.pop(name)

    def where(self, name: str) -> str:
        files = {stored.relative_path for index, stored in self._metadata.storage_data.items() if index.fqn == name}
        return ", ".join(str(self.place / file) for file in sorted(files))


class TensorSource:
    """Tensors in memory."""

    def __init__(self, place: Path, tensors: Mapping[str, Tensor]) -> None:
        self.place, self._tensors = place, tensors
        self.facts: Mapping[str, TensorFacts] = {
            name: TensorFacts(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._tensors[name]

    def where(self, name: str) -> str:
        return str(self.place)


class RenamedSource:
    """Some of another source's tensors under other names."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self.place = source.place
        self._source, self._names = source, dict(names)  # new name -> name in the source
        self.facts: Mapping[str, TensorFacts] = {new: source.facts[old] for new, old in names.items()}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        read = self._source.read([self._names[name] for name in names])
        for name, (_, tensor) in zip(names, read, strict=True):
            yield name, tensor

    def where(self, name: str) -> str:
        return self._source.where(self._names[name])


def open_weights(folder: Path, *, of_checkpoint: bool = False) -> WeightSource:
    """The weights in `folder`, in any supported format. Those of a checkpoint may be in its subfolder `model`."""
    for place in (folder, folder / "model") if of_checkpoint else (folder,):
        if (place / ".metadata").is_file():
            return DcpSource(place)
        if next(place.glob("*.distcp"), None) is not None:
            raise InputError(f"{place / '.metadata'} is missing; without it the .distcp files cannot be read")
        if next(place.glob("*.safetensors"), None) is not None or (place / "model.safetensors.index.json").is_file():
            return SafetensorsSource(place)
    if next(folder.glob("iter_*"), None) is not None:
        raise InputError(f"{folder} holds a Megatron checkpoint; accepted: safetensors or torch DCP weights")
    raise InputError(f"{folder} holds no weights; accepted: *.safetensors, or .metadata with *.distcp (torch DCP)")
