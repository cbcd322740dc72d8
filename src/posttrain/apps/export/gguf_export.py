"""Converts a Hugging Face folder to a GGUF file for llama.cpp. The file is read back and compared before it is renamed.

Families: Llama (and Mistral without a sliding window), Qwen2, Qwen3. Number formats: f32, f16, bf16, q8_0 (blocks of 32
with one scale); norms and biases stay f32, as llama.cpp requires. Weights are processed one at a time. The reverse is
`models/gguf_import.py`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posttrain.apps.export.conversion_input import read_model_config
from posttrain.apps.export.convert import Advance
from posttrain.apps.export.gguf_tokenizer import add_tokenizer
from posttrain.apps.export.weight_names import WeightShapes, match_names
from posttrain.apps.export.weight_sources import RenamedSource, WeightSource, open_weights
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.models.gguf_import import require_gguf
from posttrain.models.tensor_files import TensorFacts

if TYPE_CHECKING:
    from types import ModuleType

    from gguf import GGUFWriter, TensorNameMap
    from transformers import PretrainedConfig

Say = Callable[[str], None]
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_GGUF_MAGIC = b"GGUF"  # the first bytes of every such file
_BLOCK = 32  # numbers that share a scale in q8_0
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class GgufSettings:
    type: str = "f16"
    pre: str | None = None  # llama.cpp's name of the pre-tokenizer; None: recognised from tokenizer.json


@dataclass(frozen=True)
class GgufFile:
    file: Path
    num_tensors: int
    num_bytes: int
    max_error: float  # of any weight, against the source


@dataclass(frozen=True)
class _Planned:
    """A tensor of the GGUF file."""

    name: str  # in the file
    source: str  # in the Hugging Face folder; empty for one that is computed
    facts: TensorFacts
    type: str

    @property
    def num_bytes(self) -> int:
        count = math.prod(self.facts.shape)
        per_number = {"f32": 4 * count, "f16": 2 * count, "bf16": 2 * count}
        return {**per_number, "q8_0": count // _BLOCK * (_BLOCK + 2)}[self.type]


def check_gguf_target(file: Path, force: bool) -> None:
    require_gguf()
    if file.is_dir():
        raise InputError(f"{file} is a folder; accepted: the name of a file, such as model.gguf")
    if file.exists() and not force:
        raise InputError(f"{file} exists; name another file, or replace it with --force")
    if file.is_file():
        with file.open("rb") as stream:
            begins_with = stream.read(len(_GGUF_MAGIC))
        if begins_with not in (b"", _GGUF_MAGIC):
            raise InputError(f"{file} is no GGUF file, which --force does not replace; name another file")


@contextmanager
def folder_to_export(model: str, file: Path, convert: Callable[[Path], object]) -> Iterator[Path]:
    """A Hugging Face folder with the model: `model` itself if it is one, else converted to a temporary folder."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        yield folder
        return
    durable.make_folder(file.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.absolute().parent) as scratch:
        convert(Path(scratch) / "model")
        yield Path(scratch) / "model"


def export_gguf(
    folder: Path, file: Path, settings: GgufSettings, *, say: Say = print, advance: Advance | None = None
) -> GgufFile:
    """Write the model in `folder` to the new file `file`."""
    import gguf
    from transformers import AutoTokenizer

    require_gguf()
    config = read_model_config(str(folder), {}, str(folder / "config.json"))
    family = _FAMILIES.get(config.model_type)
    if family is None or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        what = config.model_type if family is None else f"{config.model_type} with a sliding window"
        raise InputError(f"{folder}: {what} is not written as GGUF; accepted: {', '.join(_FAMILIES)}")
    shape = WeightShapes.of(config, str(folder / "config.json"))
    source = open_weights(folder)
    weights = RenamedSource(source, match_names(shape, source))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    planned = _plan(weights, gguf.get_tensor_name_map(arch, config.num_hidden_layers), settings.type)
    rope = _rope_factors(config)
    if rope is not None:
        planned.insert(0, _Planned("rope_freqs.weight", "", TensorFacts(tuple(rope.shape), torch.float32), "f32"))

    file = file.absolute()
    durable.make_folder(file.parent)
    with durable.replacing(file) as unfinished:
        writer = gguf.GGUFWriter(unfinished, family)
        _add_header(writer, gguf, config, file.stem, settings.type)
        vocab_size = weights.facts["model.embed_tokens.weight"].shape[0]
        add_tokenizer(writer, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), vocab_size, settings.pre)
        _write(writer, gguf, planned, weights, config, rope, advance)
        say("Reading the file back")
        error = _compare(unfinished, gguf, planned, weights, config, rope)
    return GgufFile(file, len(planned), file.stat().st_size, error)


def _plan(weights: WeightSource, names: TensorNameMap, wanted: str) -> list[_Planned]:
    planned = []
    for name, facts in weights.facts.items():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise InputError(f"{name} has no counterpart in a GGUF file of this family")
        kind = "f32" if len(facts.shape) == 1 else wanted
        if kind == "q8_0" and facts.shape[-1] % _BLOCK:
            kind = "f16"  # as llama.cpp does with rows that are no whole blocks
        planned.append(_Planned(mapped, name, facts, kind))
    return planned


def _add_header(writer: GGUFWriter, gguf: ModuleType, config: PretrainedConfig, name: str, wanted: str) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[wanted]])
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR if kind == "linear" else gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)
    elif kind not in ("default", "llama3"):
        raise InputError(f"positions of the kind {kind!r} (rope_parameters.rope_type) are not written as GGUF")


def _rope_factors(config: PretrainedConfig) -> Tensor | None:
    """Llama 3's stretched positions, as divisors of each frequency; None for models without."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    wavelengths = 2 * math.pi / frequencies
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)  # 0: stretched in full, 1: left alone
    return 1.0 / ((1 - smooth) / rope["factor"] + smooth)


def _in_gguf_order(name: str, tensor: Tensor, config: PretrainedConfig) -> Tensor:
    """llama.cpp rotates neighbouring pairs of a Llama's queries and keys, transformers the two halves of a head."""
    if _FAMILIES[config.model_type] != "llama" or ".self_attn." not in name:
        return tensor
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _tensors(
    planned: list[_Planned], weights: WeightSource, config: PretrainedConfig, rope: Tensor | None
) -> Iterator[Tensor]:
    """The source's tensors in float32 and in llama.cpp's order, one at a time."""
    for each in planned:
        if not each.source:
            assert rope is not None
            yield rope
            continue
        ((name, tensor),) = weights.read([each.source])
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} of {weights.where(name)} holds numbers that are not finite")
        yield _in_gguf_order(name, tensor.float(), config)


def _write(
    writer: GGUFWriter,
    gguf: ModuleType,
    planned: list[_Planned],
    weights: WeightSource,
    config: PretrainedConfig,
    rope: Tensor | None,
    advance: Advance | None,
) -> None:
    total = sum(each.num_bytes for each in planned)
    for each in planned:
        kind = gguf.GGMLQuantizationType[each.type.upper()]
        writer.add_tensor_info(each.name, each.facts.shape, np.dtype(np.float32), each.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each, tensor in zip(planned, _tensors(planned, weights, config, rope), strict=True):
        kind = gguf.GGMLQuantizationType[each.type.upper()]
        if each.type == "f16" and float(tensor.abs().max()) > torch.finfo(torch.float16).max:
            raise InputError(f"{each.source} has numbers too large for f16; use --gguf-type bf16 or f32")
        writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), kind))
        if advance is not None:
            advance(each.num_bytes, total)
    writer.close()


def _compare(
    file: Path,
    gguf: ModuleType,
    planned: list[_Planned],
    weights: WeightSource,
    config: PretrainedConfig,
    rope: Tensor | None,
) -> float:
    """Read the file back; the largest error of any number. InputError if one is larger than its format explains."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    worst = 0.0
    for each, tensor in zip(planned, _tensors(planned, weights, config, rope), strict=True):
        stored = found[each.name]
        read = torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type))).reshape(tensor.shape)
        error = (read - tensor).abs()
        if bool((error > _accepted_error(tensor, each.type)).any()):
            raise InputError(f"{each.name} was not written as it should be: off by up to {float(error.max()):.3g}")
        worst = max(worst, float(error.max()))
    return worst


def _accepted_error(tensor: Tensor, kind: str) -> Tensor:
    """Half a unit in the last place; in q8_0 half a step of the block's scale, which is itself rounded to f16."""
    if kind == "f32":
        return torch.zeros_like(tensor)
    if kind == "q8_0":
        largest = tensor.reshape(-1, _BLOCK).abs().amax(-1, keepdim=True)
        step = largest / 127 * (0.5 + 127 * 2**-10)
        return (step * 1.01 + 2**-24).expand(-1, _BLOCK).reshape(tensor.shape)
    relative, least = (2**-11, 2**-25) if kind == "f16" else (2**-8, 0.0)
    return tensor.abs() * relative * 1.001 + least
