"""Our reader and writer of safetensors against the library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.apps.export.weight_sources import SafetensorsSource
from posttrain.errors import InputError
from posttrain.models.tensor_files import DTYPE_OF_CODE, TensorFacts, stored_parts, write_safetensors

TENSORS = {
    "a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(7, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
    "count": torch.arange(4),
}


def facts(tensors: dict[str, torch.Tensor]) -> dict[str, TensorFacts]:
    return {name: TensorFacts(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    for _ in write_safetensors(file, facts(tensors), iter(tensors.items())):
        pass


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", TENSORS)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path)
    read = dict(source.read(list(TENSORS)))
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert source.where("a") == str(tmp_path / "x.safetensors")


def test_every_type_goes_round(tmp_path: Path) -> None:
    tensors = {
        code: torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        for code, dtype in DTYPE_OF_CODE.items()
    }
    write(tmp_path / "x.safetensors", tensors)
    assert {name: part.facts.dtype for name, part in stored_parts(tmp_path / "x.safetensors").items()} == DTYPE_OF_CODE


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "x.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read as safetensors"):
        stored_parts(file)


def part_file(file: Path, name: str, whole: torch.Tensor, rows: slice) -> None:
    """As torch.distributed.checkpoint writes the share of one rank."""
    info = json.dumps({name: {"saved_offsets": [rows.start, 0]}})
    save_file({name: whole[rows].contiguous()}, file, metadata={"DCP_SHARDING_INFO": info})


def test_parts_of_a_tensor_are_put_together(tmp_path: Path) -> None:
    whole = TENSORS["a"]
    part_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors", "a", whole, slice(0, 2))
    part_file(tmp_path / "shard-00002-model-00001-of-00001.safetensors", "a", whole, slice(2, 3))
    assert torch.equal(dict(SafetensorsSource(tmp_path).read(["a"]))["a"], whole)


def test_missing_middle_part_is_detected(tmp_path: Path) -> None:
    whole = TENSORS["a"]
    part_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors", "a", whole, slice(0, 1))
    part_file(tmp_path / "shard-00002-model-00001-of-00001.safetensors", "a", whole, slice(2, 3))
    with pytest.raises(InputError, match=r"a: .* hold 10 of its 15 numbers; a shard is missing"):
        SafetensorsSource(tmp_path)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(InputError, match="shard 1 of at least 2 is missing"):
        SafetensorsSource(tmp_path)


def test_files_of_the_index_must_exist(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is missing"):
        SafetensorsSource(tmp_path)
