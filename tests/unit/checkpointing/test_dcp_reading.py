"""Folders of torch.distributed.checkpoint: tensors are read, code that is stored in them never runs."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from posttrain.apps.export.weight_sources import DcpSource
from posttrain.checkpointing.dcp_reading import TensorReader, load_tensors, tensor_entries
from posttrain.errors import InputError

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({**TENSORS, "steps": 3}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_tensors_are_read_and_other_values_left_out(folder: Path) -> None:
    reader = TensorReader(folder)
    found = {
        name: torch.empty(e.size, dtype=e.properties.dtype)
        for name, e in tensor_entries(reader.read_metadata()).items()
    }
    assert set(found) == set(TENSORS)
    load_tensors(found, reader, no_dist=True)
    for name, expected in TENSORS.items():
        assert torch.equal(found[name], expected)


def test_a_class_in_the_index_that_dcp_does_not_write_is_named_and_not_created(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for hostile in (
        Hostile(tmp_path / "ran"),
        replace(metadata, planner_data=Hostile(tmp_path / "ran")),
        replace(metadata, storage_data={**metadata.storage_data, "x": Hostile(tmp_path / "ran")}),
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir"):
            TensorReader(folder).read_metadata()
        with pytest.raises(InputError, match=r"\.metadata cannot be read: it names posix\.mkdir"):
            DcpSource(folder)
    assert not (tmp_path / "ran").exists()


def test_attributes_of_allowed_classes_cannot_be_reached(folder: Path) -> None:
    """Protocol 4 resolves dotted names, which lead from a class to the functions of its module."""
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "serialization.os.system"),
        ("builtins", "eval"),
        ("pathlib", "os.system"),
    ):
        stack_global = pickle.PROTO + b"\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
        stack_global += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + pickle.STACK_GLOBAL + pickle.STOP
        (folder / ".metadata").write_bytes(stack_global)
        with pytest.raises(pickle.UnpicklingError, match="not loaded"):
            TensorReader(folder).read_metadata()


def test_a_tensor_that_the_index_calls_bytes_is_not_unpickled(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == "b"]
    stored = metadata.storage_data.pop(index)
    torch.save(Hostile(tmp_path / "ran"), folder / "payload")
    size = (folder / "payload").stat().st_size
    metadata.state_dict_metadata["b"] = BytesStorageMetadata()
    metadata.storage_data[type(index)("b")] = replace(stored, relative_path="payload", offset=0, length=size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="b is not a tensor"):
        load_tensors({"b": torch.empty(4)}, TensorReader(folder), no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_shards_outside_of_the_folder_are_refused(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for outside in ("../secret", "/etc/passwd"):
        metadata.storage_data = {
            index: replace(stored, relative_path=outside) for index, stored in metadata.storage_data.items()
        }
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(pickle.UnpicklingError, match="outside of the folder"):
            TensorReader(folder).read_metadata()


@pytest.mark.parametrize("size", [torch.Size([2**40, 2**20]), torch.Size([10**6])])
def test_a_tensor_larger_than_all_files_is_refused_before_memory_is_taken(folder: Path, size: torch.Size) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["b"].size = size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match=r"it says that b has the shape .*; all files there have"):
        TensorReader(folder).read_metadata()
    with pytest.raises(InputError, match=r"\.metadata cannot be read: it says that b"):
        DcpSource(folder)
