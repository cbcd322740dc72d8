"""`step_N.tokens.npz`: what is written is read back, equal numbers give equal bytes, and no credential gets into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import byte_tokenizer

from posttrain.files.redaction import name_secret
from posttrain.reporting.run_files import open_run
from posttrain.reporting.token_files import read_tokens, token_pieces, write_tokens
from posttrain.types import TokenTrace

TRACE = TokenTrace(7, 1, (5, 6, 7), (True, False, True), (-0.5, 0.0, -2.0), (-0.25, -9.0, -2.0), (1.5, 0.0, 1.5))
WORDS = {5: "a", 6: " b", 7: " ü"}


def pieces(token_ids: tuple[int, ...]) -> list[str]:
    return [WORDS[token] for token in token_ids]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_1.tokens.npz"
    path.parent.mkdir()
    other = replace(TRACE, draw=8, sample=0, token_ids=(7,), trained=(True,), sampler_logprobs=(-1.0,),
                    trainer_logprobs=(-1.0,), advantages=(0.5,))  # fmt: skip
    write_tokens(path, [TRACE, other], pieces)
    found = read_tokens(path)
    assert found is not None
    part = found.answer(7, 1)
    assert part == slice(0, 3)
    assert found.pieces(part) == ["a", " b", " ü"]
    assert found.pieces(found.answer(8, 0) or slice(0)) == [" ü"]
    np.testing.assert_array_equal(found.trainer_logprobs[part], [-0.25, -9.0, -2.0])
    assert found.reference_logprobs is None
    assert found.answer(7, 0) is None


def test_equal_numbers_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tokens(tmp_path / f"{name}.npz", [TRACE], pieces)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_answer_with_a_credential_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.files.redaction._named_values", set())
    name_secret("topsecret")
    texts = {1: ["top", "sec", "ret"], 2: ["no", "thi", "ng"]}
    traces = [replace(TRACE, draw=draw) for draw in texts]
    order = iter(texts.values())
    write_tokens(tmp_path / "t.npz", traces, lambda token_ids: next(order))
    found = read_tokens(tmp_path / "t.npz")
    assert found is not None
    assert found.draws.tolist() == [2]


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 torn"])
def test_damaged_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.npz").write_bytes(content)
    assert read_tokens(tmp_path / "t.npz") is None


@pytest.mark.parametrize("text", ["plain words", "Füße 数学 🙂!", "🙂"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = token_pieces(lambda some: tokenizer.decode(list(some)))(ids)
    assert len(found) == len(ids)
    assert "".join(found) == text


def test_resume_removes_the_tokens_of_steps_that_run_again(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (2, 4):
        write_tokens(tmp_path / "rollouts" / f"step_{step}.tokens.npz", [TRACE], pieces)
    open_run(tmp_path, 3)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_2.tokens.npz"]
