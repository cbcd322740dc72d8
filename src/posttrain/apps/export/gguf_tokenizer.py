"""Writes a byte-level BPE tokenizer to GGUF: tokens, their types, merges, special ids, chat template.

llama.cpp pre-tokenizes with its own code, selected by a name. Common rules are recognised from tokenizer.json. For any
other the user has to give the name (--gguf-pre): a wrong one would split text wrongly and silently. SentencePiece
tokenizers are not supported.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType
    from transformers import PreTrainedTokenizerBase

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}


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
    """Write the tokenizer's part of the header. `vocab_size` is the number of rows of the embedding."""
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
    tokens, types = [], []
    for token_id in range(vocab_size):
        if token_id not in by_id:  # rows that pad the embedding
            tokens.append(f"[PAD{token_id}]")
            types.append(kinds.UNUSED)
        elif token_id in added:
            tokens.append(by_id[token_id])
            types.append(kinds.CONTROL if added[token_id].special else kinds.USER_DEFINED)
        else:
            tokens.append(by_id[token_id])
            types.append(kinds.NORMAL)
    return tokens, types
