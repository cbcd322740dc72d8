"""GGUF files hold the model: read back by transformers and by our own importer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.apps.export.gguf_export import GgufSettings, check_gguf_target, export_gguf, pre_tokenizer_name
from posttrain.errors import InputError
from posttrain.models.gguf_import import convert_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed (posttrain[gguf])")

PROMPT = torch.tensor([[5, 9, 200, 17, 3, 3, 90]])
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3")


def quiet(_: str) -> None:
    pass


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges, cut into words as GPT-2 does."""
    tokenizer = build_tokenizer()
    return tokenizer.train_new_from_iterator(["What is 17 plus 26? What is 43 minus 17?"] * 4, vocab_size=300)


def save(folder: Path, family: str, **overrides: Any) -> Path:
    tokenizer = merging_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_model(family, vocab_size=len(tokenizer) + 3, **ids, **overrides).save_pretrained(
        folder
    )  # three rows of padding
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path, **arguments: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    found: Tensor = model.eval()(PROMPT).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_file_with_equal_logits(family: str, tmp_path: Path) -> None:
    # Of a Qwen3 file transformers does not read the size of a head, and takes that of the published models.
    folder = save(tmp_path / "model", family, **({"head_dim": 128} if family == "qwen3" else {}))
    done = export_gguf(folder, tmp_path / "m.gguf", GgufSettings("f32"), say=quiet)
    assert done.max_error == 0.0
    torch.testing.assert_close(logits(tmp_path, gguf_file="m.gguf"), logits(folder), rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "model"]


@pytest.mark.parametrize(("kind", "limit"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2)])
def test_smaller_formats_stay_near_the_model(kind: str, limit: float, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96)
    done = export_gguf(folder, tmp_path / "m.gguf", GgufSettings(kind), say=quiet)
    assert 0 < done.max_error < limit
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(done.file)).tensors}
    assert types["blk.0.attn_q.weight"] == kind.upper()
    assert types["blk.0.attn_norm.weight"] == "F32"
    difference = (logits(tmp_path, gguf_file="m.gguf") - logits(folder)).abs().max()
    assert 0 < difference < 0.2 * logits(folder).std()


def test_the_tokenizer_and_its_template_survive(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2")
    export_gguf(folder, tmp_path / "m.gguf", GgufSettings("f32"), say=quiet)
    before, after = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"),
    )
    text = "What is 17 + 26? Say it twice — 43, 43."
    assert after(text).input_ids == before(text).input_ids
    assert after.eos_token_id == before.eos_token_id
    assert after.chat_template == before.chat_template


def test_import_undoes_export(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", dtype=torch.bfloat16)
    export_gguf(folder, tmp_path / "m.gguf", GgufSettings("bf16"), say=quiet)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "back", say=quiet)
    torch.testing.assert_close(logits(tmp_path / "back"), logits(folder), rtol=1e-5, atol=1e-5)


def test_llama_3_rope_scaling_is_written(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = save(tmp_path / "model", "llama", rope_parameters=rope)
    done = export_gguf(folder, tmp_path / "m.gguf", GgufSettings("f32"), say=quiet)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(str(done.file)).tensors}
    model = AutoModelForCausalLM.from_pretrained(folder)
    stretched = model.model.rotary_emb.inv_freq
    plain = torch.tensor([10000.0 ** (-i / 8) for i in range(0, 8, 2)])
    assert not torch.allclose(stretched, plain)
    torch.testing.assert_close(torch.tensor(tensors["rope_freqs.weight"]), plain / stretched, rtol=1e-5, atol=1e-5)


def test_pre_tokenizer_is_recognised() -> None:
    def name(tokenizer: PreTrainedTokenizerFast) -> str | None:
        import json

        return pre_tokenizer_name(json.loads(tokenizer.backend_tokenizer.to_str()))

    assert name(build_tokenizer()) == "gpt-2"
    odd = byte_tokenizer()
    assert name(odd) is None
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    assert name(odd) == "smollm"


def test_unsupported_models_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "gemma", "gemma")
    with pytest.raises(InputError, match="gemma is not written as GGUF; accepted: llama"):
        export_gguf(folder, tmp_path / "m.gguf", GgufSettings(), say=quiet)
    folder = save(tmp_path / "sliding", "mistral")
    with pytest.raises(InputError, match="mistral with a sliding window"):
        export_gguf(folder, tmp_path / "m.gguf", GgufSettings(), say=quiet)
    folder = save(tmp_path / "odd", "llama")
    byte_tokenizer().save_pretrained(folder)
    with pytest.raises(InputError, match="give it with --gguf-pre"):
        export_gguf(folder, tmp_path / "m.gguf", GgufSettings(), say=quiet)
    assert export_gguf(folder, tmp_path / "named.gguf", GgufSettings(pre="gpt-2"), say=quiet).num_tensors > 0
    assert not list(tmp_path.glob("*m.gguf*"))
    with pytest.raises(InputError, match=r"named\.gguf exists"):
        check_gguf_target(tmp_path / "named.gguf", force=False)
    check_gguf_target(tmp_path / "named.gguf", force=True)
    with pytest.raises(InputError, match=r"model\.safetensors is not a GGUF file, which --force does not replace"):
        check_gguf_target(folder / "model.safetensors", force=True)


def test_numbers_outside_a_format_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for value, words in ((1e6, "too large for f16"), (math.nan, "not finite")):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = value
        model.save_pretrained(folder)
        with pytest.raises(InputError, match=words):
            export_gguf(folder, tmp_path / "m.gguf", GgufSettings("f16"), say=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
