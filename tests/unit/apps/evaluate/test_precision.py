"""The number format of the engines, whichever of the two places names it."""

import pytest

from posttrain.apps.evaluate.model import native_precision, vllm_precision
from posttrain.config import load_config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "auto"),
        (["generation.precision=bfloat16"], "bfloat16"),
        (["generation.vllm_cfg.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=bfloat16"], "auto"),
        (["generation.precision=bfloat16", "generation.vllm_cfg.precision=float32"], "bfloat16"),
    ],
)
def test_float32_under_vllm_cfg_holds_for_the_native_engine(words: list[str], expected: str) -> None:
    assert native_precision(load_config("eval", None, words).config.generation) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "bfloat16"),
        (["generation.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=null"], "auto"),
    ],
)
def test_vllm_reads_both(words: list[str], expected: str) -> None:
    assert vllm_precision(load_config("eval", None, words).config.generation) == expected
