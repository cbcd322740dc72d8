"""Converts a GGUF file to a Hugging Face folder: bf16 safetensors, config, tokenizer with its chat template.

GGUF weights are often quantised. Their dequantised values are written, so the model can be trained but is not bit-equal
to the weights it was quantised from. Where GGUF files come from is in `catalogue.py`.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import InputError, reason_of
from posttrain.files import durable
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Say = Callable[[str], None]

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` holds a converted model. Conversion renames a finished folder, so it is never incomplete."""
    return all((folder / name).is_file() for name in MODEL_FILES)


def require_gguf() -> None:
    """InputError with the extra to install, before anything is downloaded."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            "reading a GGUF file needs the Python package `gguf`, which is not installed. "
            'Install the extra: pip install "posttrain[gguf]"'
        )


def convert_gguf(gguf: Path, target: Path, *, card: str = "", say: Say = print) -> None:
    """Converts the file `gguf` to the new folder `target`, which appears only once it is complete."""
    require_gguf()
    if not gguf.is_file():
        raise InputError(f"GGUF file not found: {gguf}")
    _check_absent(target)

    import transformers  # noqa: F401  import first: its log handler keeps the current stderr

    with durable.new_folder(target, _check_absent) as unfinished:
        with redirect_stderr(io.StringIO()):  # the progress bars of the libraries
            say("reading the tokenizer")
            with _naming(gguf):
                tokenizer = _tokenizer(gguf)
            tokenizer.save_pretrained(unfinished)
            say("reading and dequantising the weights, which takes about a minute")
            with _naming(gguf):
                model = _plain_model(gguf)
            model.save_pretrained(unfinished)
        if card:
            (unfinished / "README.md").write_text(card, encoding="utf-8")
        for file in unfinished.iterdir():
            file.chmod(0o644)  # safetensors makes its own private
    say(f"wrote {target}")


@contextmanager
def _naming(gguf: Path) -> Iterator[None]:
    """A damaged file gives errors of any class in the libraries that read it."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {reason_of(error)})"
        ) from error


def _check_absent(target: Path) -> None:
    if target.exists():
        raise InputError(f"{target} already exists; remove it or name another folder")


def _tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    header = _header(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    if header.get("tokenizer.ggml.pre") == "smollm":
        # transformers reads every GPT-2 style vocabulary alike. This family was trained with every digit as a token of
        # its own, which decides how runs of spaces before a digit are split.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    context_length = header.get(f"{header.get('general.architecture')}.context_length")
    if context_length:
        tokenizer.model_max_length = int(context_length)
    return tokenizer


def _header(gguf: Path) -> JsonObject:
    """The scalar fields of the file's header; the long ones (vocabulary, merges) are left out."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(str(gguf))
    fields = reader.fields.items()
    header = {name: field.contents() for name, field in fields if field.types[:1] != [GGUFValueType.ARRAY]}
    num_layers = header.get(f"{header.get('general.architecture')}.block_count")
    if not isinstance(num_layers, int) or not 0 < num_layers <= len(
        reader.tensors
    ):  # each is built before it is filled
        raise InputError(
            f"{gguf}: the header names {num_layers} layers, and the file has {len(reader.tensors)} tensors"
        )
    return header


def _plain_model(gguf: Path) -> PreTrainedModel:
    """Removes quantisation settings from the model: a model loaded from GGUF cannot be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    loaded, found = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):  # transformers would fill them with random numbers
        raise InputError(f"{gguf} has no weights for {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}")
    foreign = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    settings = {name: value for name, value in loaded.config.to_dict().items() if name not in foreign}
    settings["dtype"] = "bfloat16"
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model
