"""Weights for engines in other processes, through a file that both sides map into memory.

The first rank copies its weights into the file, of an adapted model the adapters alone; an engine copies them into its own
tensors, in place. Each tensor has a checksum, taken where the trainer has it and compared where the engine has it. The file
keeps the newest weights, so an engine that is started anew gets those that it lost. On a GPU both mappings are pinned.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.errors import HardwareError
from posttrain.models.lora import is_adapted
from posttrain.policy import host_memory
from posttrain.policy.checkpoint.contents import named_adapters, named_weights
from posttrain.policy.parallel import copy_into, is_first_rank

MEMORY_FOLDER = Path("/dev/shm")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Handover:
    """Where a run's engines get their weights."""

    run: str  # keeps the files of several runs apart; a resumed run replaces its own
    shared_folder: Path  # on a filesystem that all machines of the run share
    on_one_machine: bool

    def file(self, num_bytes: int) -> Path:
        """In memory where all processes are on one machine that has room."""
        in_memory = MEMORY_FOLDER / f"posttrain-weights-{self.run}"
        if self.on_one_machine and MEMORY_FOLDER.is_dir():
            free = shutil.disk_usage(MEMORY_FOLDER).free + (in_memory.stat().st_size if in_memory.exists() else 0)
            if free > num_bytes:
                return in_memory
        return self.shared_folder / f"weights-{self.run}"


@dataclass(frozen=True)
class SentTensor:
    begin: int  # byte in the file
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


@dataclass(frozen=True)
class SentWeights:
    """What the file holds."""

    file: Path
    num_bytes: int
    tensors: Mapping[str, SentTensor]
    on_one_machine: bool


@dataclass
class WeightSender:
    """The trainer's side. Every rank calls `send`: sharded tensors are gathered one at a time."""

    model: nn.Module
    _file: Path | None = None
    _buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def send(self, to: Handover) -> SentWeights | None:
        """Fill the file. None on ranks other than the first."""
        weights = _weights_of(self.model)
        if not is_first_rank():
            for _ in _whole(weights):
                pass
            return None
        begins, num_bytes = host_memory.place(list(weights.values()))
        if self._file is None:
            self._file = to.file(num_bytes)
            self._buffer = _create(self._file, num_bytes)
        sent = {}
        for begin, (name, tensor) in zip(begins, _whole(weights), strict=True):
            host_memory.view(self._buffer, begin, tensor).copy_(tensor, non_blocking=True)
            sent[name] = SentTensor(begin, tuple(tensor.shape), tensor.dtype, checksum(tensor))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not to.on_one_machine:
            host_memory.flush(self._buffer)
        return SentWeights(self._file, num_bytes, sent, to.on_one_machine)

    def remove_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


@dataclass
class WeightReceiver:
    """The engine's side."""

    model: nn.Module
    _buffer: Tensor | None = None

    @torch.no_grad()
    def receive(self, sent: SentWeights) -> None:
        if (
            self._buffer is None or not sent.on_one_machine
        ):  # other machines see new contents of a file when they open it
            self._buffer = host_memory.map_file(sent.file, sent.num_bytes)
        own = _weights_of(self.model)
        assert own.keys() == sent.tensors.keys(), "trainer and engine have the same model"
        for name, tensor in sent.tensors.items():
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            copy_into(own[name], host_memory.view(self._buffer, tensor.begin, like))
        for name, tensor in sent.tensors.items():
            if checksum(own[name]) != tensor.checksum:
                raise HardwareError(
                    f"{name} arrived changed in the engine: its checksum is another than the trainer's. {sent.file} was written "
                    "to by another process, or memory or a disk is faulty. The same command continues from what was saved"
                )


def checksum(tensor: Tensor) -> int:
    """Of the bits: sums over rows, weighted by the number of the row. Whole numbers, so the order of adding does not matter."""
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    rows = bits.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1).sum(-1, dtype=torch.int64)
    return int((rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum())


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What changes in training: adapters, or everything."""
    return named_adapters(model) if is_adapted(model) else named_weights(model)


def _whole(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _create(file: Path, num_bytes: int) -> Tensor:
    """A file of this size, mapped. Its space is reserved: writing to a mapping that has none would end the process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    return host_memory.map_file(file, num_bytes)
