"""Weight transfer to engines in other processes.

Every rank sends the parts of the weights that it holds; for adapted models only the adapters. An engine copies them
into its own tensors, in place. Each part has a checksum, computed on the rank and verified on the engine.

A rank copies its parts to a file that engines map into memory. On GPUs of one machine, engines read them faster from a
bucket in the rank's GPU memory, opened over CUDA IPC. The file is then written in the background, before weights change
again. It holds the newest weights, so a restarted engine can load them. On a GPU, mappings of the file are pinned.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.engines.vllm.side.posttrain_weights import ALIGNMENT, handle_of, lots_of, open_handle
from posttrain.errors import HardwareError, reason_of
from posttrain.models.lora import is_adapted
from posttrain.policy import host_memory
from posttrain.policy.checkpoint.files import named_adapters, named_weights
from posttrain.policy.memory.peak_memory import BUCKET_BYTES
from posttrain.policy.parallel.fsdp import first_of_part, is_first_copy, is_first_rank, local_part
from posttrain.policy.runtime import shareable_memory

MEMORY_FOLDER = Path("/dev/shm")
_COMPLETE_S = 300.0  # wait limit for a running copy to a file
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Handover:
    """Where a run's engines get their weights."""

    run: str  # distinguishes the files of several runs; a resumed run replaces its own
    shared_folder: Path  # on a filesystem that all machines of the run share
    on_one_machine: bool
    over_gpu_memory: bool = True  # if ranks are on GPUs of one machine

    def file(self, rank: int, num_bytes: int) -> Path:
        """In shared memory if all processes are on one machine with space for the `num_bytes` of all ranks."""
        name = f"posttrain-weights-{self.run}"
        if self.on_one_machine and MEMORY_FOLDER.is_dir():
            held = 0
            for file in MEMORY_FOLDER.glob(f"{name}-*"):
                with suppress(FileNotFoundError):  # another rank replaces its own
                    held += file.stat().st_size
            if shutil.disk_usage(MEMORY_FOLDER).free + held > num_bytes:
                return MEMORY_FOLDER / f"{name}-{rank}"
        return self.shared_folder / f"weights-{self.run}-{rank}"

    def remove_files(self, first_rank: int = 0) -> None:
        """Remove the files of this rank and all later ones on this machine."""
        for folder in (MEMORY_FOLDER, self.shared_folder):
            for file in folder.glob(f"*weights-{self.run}-*"):
                if int(file.name.rpartition("-")[2]) >= first_rank:
                    with suppress(OSError):
                        file.unlink()


class PartOffset(NamedTuple):
    """Where a part is in a file or in the bucket."""

    part: int
    begin: int  # byte


@dataclass(frozen=True)
class SentPart:
    """A part of a tensor: a box that begins at `first`."""

    name: str
    first: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


@dataclass(frozen=True)
class SentWeights:
    """What one rank sends."""

    parts: tuple[SentPart, ...]
    file: Path
    num_bytes: int  # size of the parts in the file; the transfer number follows once they are complete
    number: int
    places: tuple[PartOffset, ...]  # in the file
    on_one_machine: bool
    handle: str = ""  # empty: no bucket
    lots: tuple[tuple[PartOffset, ...], ...] = ()  # contents of the bucket, one batch after another
    why_no_bucket: str = ""  # if one was expected


class _Part(NamedTuple):
    name: str
    first: tuple[int, ...]
    tensor: Tensor


@dataclass
class WeightSender:
    """The rank's side of the transfer."""

    model: nn.Module
    _file: Path | None = None
    _mapped: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _bucket: tuple[Tensor, str] | None = None  # kept with its handle, as engines have it open
    _number: int = 0
    _parts: Sequence[_Part] = ()
    _lots: tuple[tuple[PartOffset, ...], ...] = ()
    _stream: torch.cuda.Stream | None = None  # kept: each stream has its own memory
    _copied: torch.cuda.Event | None = None

    def send(self, to: Handover) -> SentWeights:
        """Start to fill the file; it is complete after `wait_until_copied`."""
        self._parts, self._number = _own_parts(self.model), self._number + 1
        tensors = [part.tensor for part in self._parts]
        begins, num_bytes = host_memory.place(tensors, ALIGNMENT)
        if self._file is None:
            rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            self._file = to.file(rank, sum(tensor.nbytes for tensor in _weights_of(self.model).values()))
            to.remove_files(num_ranks)  # of an attempt that was killed and had more ranks
            reserve_file(self._file, num_bytes + ALIGNMENT)
            self._mapped = host_memory.map_file(self._file, num_bytes + ALIGNMENT)
        sums = _numbers([checksum(tensor) for tensor in tensors])
        self._copy_to_file(begins, num_bytes)
        if not to.on_one_machine:
            self.wait_until_copied()
            host_memory.flush(self._mapped)
        why = self._share(to)
        return SentWeights(
            tuple(
                SentPart(part.name, part.first, tuple(part.tensor.shape), part.tensor.dtype, number)
                for part, number in zip(self._parts, sums, strict=True)
            ),
            self._file,
            num_bytes,
            self._number,
            tuple(map(PartOffset, range(len(begins)), begins)),
            to.on_one_machine,
            self._bucket[1] if self._bucket is not None and self._lots else "",
            self._lots,
            why,
        )

    @torch.no_grad()
    def fill(self, lot: int) -> None:
        """Put this batch into the bucket. No engine may still be reading the previous one."""
        if lot >= len(self._lots):
            return
        assert self._bucket is not None
        for index, begin in self._lots[lot]:
            tensor = self._parts[index].tensor
            host_memory.view(self._bucket[0], begin, tensor).copy_(tensor)
        if self._bucket[0].is_cuda:
            # Does not wait for the copy to the file, which has its own stream.
            torch.cuda.current_stream().synchronize()

    def wait_until_copied(self) -> None:
        """Must be called before weights change."""
        if self._copied is not None:
            self._copied.synchronize()

    def remove_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    @torch.no_grad()
    def _copy_to_file(self, begins: Sequence[int], num_bytes: int) -> None:
        """The transfer number is written last, in stream order: a reader that sees it sees complete parts."""
        like = torch.tensor([self._number])
        if not any(part.tensor.is_cuda for part in self._parts):
            for begin, part in zip(begins, self._parts, strict=True):
                host_memory.view(self._mapped, begin, part.tensor).copy_(part.tensor)
            host_memory.view(self._mapped, num_bytes, like).copy_(like)
            return
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for begin, part in zip(begins, self._parts, strict=True):
                host_memory.view(self._mapped, begin, part.tensor).copy_(part.tensor, non_blocking=True)
            number = torch.full((1,), self._number, device="cuda")
            host_memory.view(self._mapped, num_bytes, like).copy_(number, non_blocking=True)
            self._copied = stream.record_event()

    def _share(self, to: Handover) -> str:
        """Ensure a bucket that engines can open. Returns why there is none, if one was expected."""
        self._lots = ()
        if not (to.on_one_machine and to.over_gpu_memory and _is_on_gpu(self._parts)):
            return ""
        lots, size = _lots([part.tensor for part in self._parts])
        if self._bucket is None:
            try:
                with shareable_memory():
                    memory = torch.empty(size, dtype=torch.uint8, device=self._parts[0].tensor.device)
                self._bucket = memory, handle_of(memory)
            except RuntimeError as error:
                return f"this GPU's memory cannot be shared ({reason_of(error)})"
        self._lots = lots
        return ""


@dataclass
class WeightReceiver:
    """The engine's side of the transfer. Its own tensors may be sharded too."""

    model: nn.Module
    _mapped: dict[Path, Tensor] = field(default_factory=dict)
    _opened: dict[str, Tensor] = field(default_factory=dict)
    _due: set[tuple[int, int]] = field(default_factory=set)  # rank and part

    def open_buckets(self, sent: Sequence[SentWeights]) -> str:
        """Returns why the buckets cannot be opened; empty: success."""
        for one in sent:
            if one.handle and one.handle not in self._opened:
                try:
                    memory = open_handle(one.handle, torch.cuda.current_device() if torch.cuda.is_available() else 0)
                    memory[:1].cpu()  # fails without peer access between the GPUs
                except RuntimeError as error:
                    return (
                        f"the memory of a GPU that trains cannot be opened from one that samples ({reason_of(error)})"
                    )
                self._opened[one.handle] = memory
        return ""

    @torch.no_grad()
    def receive(self, sent: Sequence[SentWeights], lot: int | None = None) -> bool:
        """Read this batch from the buckets, or everything from the files. Returns whether all parts are present."""
        own = _weights_of(self.model)
        if not lot:
            _check_cover(own, sent)
            self._due = {(rank, part) for rank, one in enumerate(sent) for part in range(len(one.parts))}
        landed: list[Tensor] = []
        expected: list[tuple[SentPart, str]] = []
        for rank, one in enumerate(sent):
            if lot is None:
                memory, places = self._map(one), one.places
            elif lot < len(one.lots):
                memory, places = self._opened[one.handle], one.lots[lot]
            else:
                continue  # this rank has fewer batches
            for index, begin in places:
                part = one.parts[index]
                like = torch.empty(part.shape, dtype=part.dtype, device="meta")
                landed.append(_copy_part(own[part.name], host_memory.view(memory, begin, like), part))
                expected.append((part, str(one.file) if lot is None else "The bucket of a rank"))
                self._due.discard((rank, index))
        sums = _numbers([checksum(tensor) for tensor in landed])  # waits for the copies
        for number, (part, source) in zip(sums, expected, strict=True):
            if number != part.checksum:
                raise HardwareError(
                    f"{part.name}: checksum mismatch after weight transfer. {source} "
                    "was written to by another process, or memory or a disk is faulty. The same command continues from "
                    "what was saved"
                )
        return not self._due

    def _map(self, one: SentWeights) -> Tensor:
        if one.file not in self._mapped or not one.on_one_machine:
            # Other machines see new file contents only after reopening the file.
            self._mapped[one.file] = host_memory.map_file(one.file, one.num_bytes + ALIGNMENT)
        mapped = self._mapped[one.file]
        number = host_memory.view(mapped, one.num_bytes, torch.empty(1, dtype=torch.int64, device="meta"))
        end = time.monotonic() + _COMPLETE_S
        while int(number) != one.number:
            if time.monotonic() > end:
                raise HardwareError(
                    f"{one.file} is not complete {_COMPLETE_S:.0f} s after a rank began to copy weights to it"
                )
            time.sleep(0.001)
        return mapped


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of the bits: sums over rows, weighted by row number. Integer, so the order of addition
    does not matter.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    rows = bits.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1).sum(-1, dtype=torch.int64)
    return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """One device transfer for all checksums."""
    return [int(number) for number in torch.stack(list(sums)).tolist()] if sums else []


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The trained weights: adapters, or everything."""
    return named_adapters(model) if is_adapted(model) else named_weights(model)


def _own_parts(model: nn.Module) -> list[_Part]:
    """The parts that this rank sends. A part held by several ranks is sent by the first."""
    found = []
    for name, tensor in _weights_of(model).items():
        is_sent = is_first_copy(tensor) if isinstance(tensor, DTensor) else is_first_rank()
        local = local_part(tensor.detach())
        if is_sent and local.numel():
            found.append(_Part(name, first_of_part(tensor), local))
    return found


def _is_on_gpu(parts: Sequence[_Part]) -> bool:
    return bool(parts) and all(part.tensor.is_cuda for part in parts)


def _lots(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[PartOffset, ...], ...], int]:
    """Parts in order, in batches that fit into the bucket (larger parts alone), and the required bucket size."""
    lots, largest = [], 0
    for lot in lots_of(enumerate(tensors), BUCKET_BYTES):
        begins, size = host_memory.place([tensor for _, tensor in lot], ALIGNMENT)
        lots.append(tuple(PartOffset(index, begin) for (index, _), begin in zip(lot, begins, strict=True)))
        largest = max(largest, size)
    return tuple(lots), largest


def _check_cover(own: dict[str, Tensor], sent: Sequence[SentWeights]) -> None:
    sizes = dict.fromkeys(own, 0)
    for part in (part for one in sent for part in one.parts):
        sizes[part.name] += torch.Size(part.shape).numel()
    assert sizes == {name: tensor.numel() for name, tensor in own.items()}, "trainer and engine have the same model"


def _copy_part(own: Tensor, source: Tensor, part: SentPart) -> Tensor:
    """Copy what `own` needs of the part. Returns the part as it is in this process, for its checksum."""
    target = local_part(own)
    first = first_of_part(own)
    begins = [max(a, b) for a, b in zip(first, part.first, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(first, target.shape, part.first, part.shape, strict=True)]
    is_whole = all(b == p and e == p + n for b, e, p, n in zip(begins, ends, part.first, part.shape, strict=True))
    if not is_whole:
        source = source.to(target.device)
    wanted = source
    for dim, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin >= end:
            return source
        target = target.narrow(dim, begin - first[dim], end - begin)
        wanted = wanted.narrow(dim, begin - part.first[dim], end - begin)
    target.copy_(wanted, non_blocking=True)
    return target if is_whole else source


def reserve_file(file: Path, num_bytes: int) -> None:
    """A new file of this size. Its space is reserved: writing to a mapping without space would kill the process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        file.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        os.close(descriptor)
