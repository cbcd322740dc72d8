"""Converts a Hugging Face folder to a GGUF file for llama.cpp. The file is read back and compared before it is renamed.

Families: Llama (and Mistral without a sliding window), Qwen2, Qwen3. Number formats: f32, f16, bf16, q8_0 (blocks of 32
with one scale); norms and biases stay f32, as llama.cpp requires. Weights are processed one at a time. The reverse is
`models/gguf_import.py`.

Tokenizers: byte-level BPE. llama.cpp pre-tokenizes with its own code, selected by a name. Common rules are recognised
from tokenizer.json. For any other the user has to give the name (--gguf-pre): a wrong one would split text wrongly and
silently.
"""

from __future__ import annotations

import json
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
from posttrain.apps.export.weight_names import WeightShapes, match_names
from posttrain.apps.export.weight_sources import RenamedSource, WeightSource, open_weights
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.json_files import JsonObject
from posttrain.models.gguf_import import require_gguf
from posttrain.models.tensor_files import TensorFacts

if TYPE_CHECKING:
    from types import ModuleType

    from gguf import GGUFWriter, TensorNameMap, TokenType
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Say = Callable[[str], None]
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_GGUF_MAGIC = b"GGUF"  # the first bytes of every such file
_BLOCK = 32  # numbers that share a scale in q8_0
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}


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
        return {"f32": 4 * count, "f16": 2 * count, "bf16": 2 * count, "q8_0": count // _BLOCK * (_BLOCK + 2)}[
            self.type
        ]


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
            raise InputError(f"{file} is not a GGUF file, which --force does not replace; name another file")


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
        raise InputError(
            f"{folder}: {what} is not written as GGUF; accepted: {', '.join(_FAMILIES)}. Where llama.cpp has this "
            "family, its convert_hf_to_gguf.py reads what --to writes"
        )
    shape = WeightShapes.of(config, str(folder / "config.json"))
    source = open_weights(folder)
    weights = RenamedSource(source, match_names(shape, source))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    planned = _plan(weights, gguf.get_tensor_name_map(arch, config.num_hidden_layers), settings.type)
    rope = _rope_factors(config)
    if rope is not None:
        planned.insert(0, _Planned("rope_freqs.weight", "", TensorFacts(tuple(rope.shape), torch.float32), "f32"))

    read = _Source(planned, weights, config, rope)
    file = file.absolute()
    durable.make_folder(file.parent)
    with durable.replacing(file) as unfinished:
        writer = gguf.GGUFWriter(unfinished, family)
        _add_header(writer, gguf, config, file.stem, settings.type)
        vocab_size = weights.facts["model.embed_tokens.weight"].shape[0]
        add_tokenizer(writer, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), vocab_size, settings.pre)
        _write(writer, gguf, read, advance)
        say("Reading the file back")
        error = _compare(unfinished, gguf, read)
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


@dataclass(frozen=True)
class _Source:
    """The weights of a model, as they are written."""

    planned: list[_Planned]
    weights: WeightSource
    config: PretrainedConfig
    rope: Tensor | None

    def tensors(self) -> Iterator[tuple[_Planned, Tensor]]:
        """In float32 and in llama.cpp's order, one at a time."""
        for each in self.planned:
            if not each.source:
                assert self.rope is not None
                yield each, self.rope
                continue
            ((name, tensor),) = self.weights.read([each.source])
            if not bool(torch.isfinite(tensor).all()):
                raise InputError(f"{name} of {self.weights.where(name)} holds numbers that are not finite")
            yield each, self._in_gguf_order(name, tensor.float())

    def _in_gguf_order(self, name: str, tensor: Tensor) -> Tensor:
        """llama.cpp rotates neighbouring pairs of a Llama's queries and keys, transformers the two halves of a head."""
        counts = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        heads = counts.get(name.split(".")[-2]) if ".self_attn." in name else None
        if _FAMILIES[self.config.model_type] != "llama" or heads is None:
            return tensor
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)


def _write(writer: GGUFWriter, gguf: ModuleType, source: _Source, advance: Advance | None) -> None:
    total = sum(each.num_bytes for each in source.planned)
    kinds = {each.name: gguf.GGMLQuantizationType[each.type.upper()] for each in source.planned}
    for each in source.planned:
        shape, kind = each.facts.shape, kinds[each.name]
        writer.add_tensor_info(each.name, shape, np.dtype(np.float32), each.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each, tensor in source.tensors():
        if each.type == "f16" and float(tensor.abs().max()) > torch.finfo(torch.float16).max:
            raise InputError(f"{each.source} has numbers too large for f16; use --gguf-type bf16 or f32")
        writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), kinds[each.name]))
        if advance is not None:
            advance(each.num_bytes, total)
    writer.close()


def _compare(file: Path, gguf: ModuleType, source: _Source) -> float:
    """Read the file back; the largest error of any number. InputError if one is larger than its format explains."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    worst = 0.0
    for each, tensor in source.tensors():
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


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def pre_tokenizer_name(backend: JsonObject) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json; None if it is not recognised."""
    rule = backend.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
    return None


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int, pre: str | None) -> None:
    """Tokens, their types, merges, special ids and the chat template. `vocab_size` is the number of rows of the
    embedding."""
    import gguf

    backend = _backend(tokenizer)
    name = pre or pre_tokenizer_name(backend)
    if name is None:
        raise InputError(
            "llama.cpp's name of the tokenizer's pre_tokenizer is unknown: it is none of gpt-2, smollm, qwen2, "
            "llama-bpe. Find it in llama.cpp's list of pre-tokenizers and give it with --gguf-pre"
        )
    tokens, kinds = _tokens(tokenizer, vocab_size, gguf.TokenType)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    if merges:
        writer.add_token_merges(merges)
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if token_id is not None:
            add(token_id)
    begins = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and begins == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _backend(tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError("the tokenizer has no tokenizer.json; GGUF files are written for byte-level BPE tokenizers")
    backend: JsonObject = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = backend.get("decoder") or {}
    decoders = [decoder, *decoder.get("decoders", [])]
    if backend["model"]["type"] != "BPE" or not any(each.get("type") == "ByteLevel" for each in decoders):
        raise InputError(
            f"the tokenizer is a {backend['model']['type']} of another kind; GGUF files are written for byte-level BPE "
            "tokenizers"
        )
    return backend


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, kinds: type[TokenType]) -> tuple[list[str], list[int]]:
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if max(by_id) >= vocab_size:
        raise InputError(f"the tokenizer has token id {max(by_id)}, but the model's embedding has {vocab_size} rows")
    added = tokenizer.added_tokens_decoder
    tokens = [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]

    def kind(token_id: int) -> int:
        if token_id not in by_id:  # rows that pad the embedding
            return kinds.UNUSED
        if token_id not in added:
            return kinds.NORMAL
        return kinds.CONTROL if added[token_id].special else kinds.USER_DEFINED

    return tokens, [kind(token_id) for token_id in range(vocab_size)]
