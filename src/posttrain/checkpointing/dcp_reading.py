"""Reads a folder of torch.distributed.checkpoint (DCP), and files of torch.save, without running code that is stored in
them.

DCP pickles its index, `.metadata`, and unpickles it and every value that is not a tensor without restriction, so that a
malicious file can run any code. Here the index may contain only the classes that DCP itself puts there, values that are
not tensors are never read, and shards lie in the folder. Tensors are loaded by torch with `weights_only=True`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from posttrain.errors import CheckpointError, reason_of

_METADATA = "torch.distributed.checkpoint.metadata"
_BEFORE_TORCH_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_BEFORE_TORCH_2_3, "TensorProperties"),
    (_BEFORE_TORCH_2_3, "MEM_FORMAT_ENCODING"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
}
_PATHS = {"Path", "PosixPath", "WindowsPath"}  # in `pathlib`, from Python 3.13 on in `pathlib._local`


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which an index of tensors does not contain; not loaded"
        )


class TensorReader(dcp.FileSystemReader):
    """DCP's reader with the restrictions above."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = Path(self._get_metadata_path(kwargs.get("rank"))).read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__} instead of DCP's Metadata")
        for stored in (metadata.storage_data or {}).values():
            path = PurePath(stored.relative_path)
            if path.is_absolute() or ".." in path.parts:
                raise pickle.UnpicklingError(
                    f"it names the shard {stored.relative_path}, which is outside of the folder"
                )
        stored = sum(file.stat().st_size for file in Path(self.path).iterdir())
        for name, entry in tensor_entries(metadata).items():
            size = [int(length) for length in entry.size]
            needed = math.prod(size) * entry.properties.dtype.itemsize
            if min(size, default=0) < 0 or needed > stored:
                raise pickle.UnpicklingError(
                    f"it says that {name} has the shape {size}, {needed} bytes; all files there have {stored}"
                )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> NoReturn:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor; not loaded")


def tensor_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of an index by name. Other values, such as counters, are left out."""
    return {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(tensors: Mapping[str, Tensor], reader: TensorReader, *, no_dist: bool) -> None:
    """Fill `tensors` in place from the folder. A collective operation unless `no_dist`."""
    silence_dcp_warning()
    try:
        dcp.load(dict(tensors), storage_reader=reader, planner=_TensorsOnly(), no_dist=no_dist)
    except CheckpointException as error:  # of any rank; not an `Exception`
        reason, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{reader.path} cannot be read: {_why_unreadable(reason)}") from None


def load_plain(path: Path, map_location: str | None = None) -> Any:
    """Plain values and tensors that torch.save has written. FileNotFoundError; CheckpointError if it cannot be read."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise CheckpointError(f"{path} cannot be read: {_why_unreadable(error)}") from None


def _why_unreadable(error: BaseException) -> str:
    """Without torch's text for a pickle that it refuses: it advises to load the file with `weights_only=False`, which
    runs the code in it.
    """
    if not isinstance(error, pickle.UnpicklingError) or "weights_only" not in str(error):
        return reason_of(error)
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"it names {named[1]}, and such a file" if named else "a file of a checkpoint"
    return f"{what} contains plain values and tensors only; not loaded"


def silence_dcp_warning() -> None:
    """DCP warns without a process group, even with `no_dist`. Filters are global: no thread may restore them."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
