"""When a completion ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from posttrain.engines.native.stopping import StopRules, StopStringScanner, ends_of_sequence, stop_token_ids
from posttrain.types import Sampling

TOKENIZER = byte_tokenizer()


def model_with_eos(eos: Any) -> SimpleNamespace:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))


@pytest.mark.parametrize(
    ("eos", "tokenizer_eos", "more", "expected"),
    [
        (2, 2, {}, {2}),
        ([5, 7, 9], 9, {}, {5, 7, 9}),
        ([5, 7], 1, {}, {1, 5, 7}),
        (None, 3, {}, {3}),
        (4, None, {}, {4}),
        (None, None, {}, set()),
        (2, 1, {"end_of_turn_ids": (5, 6)}, {1, 2, 5, 6}),
        ([2, 3], 1, {"stop_token_ids": (8, 9), "end_of_turn_ids": (4,)}, {1, 2, 3, 4, 8, 9}),
    ],
)
def test_all_ends_count(eos: Any, tokenizer_eos: int | None, more: dict[str, Any], expected: set[int]) -> None:
    tokenizer = SimpleNamespace(eos_token_id=tokenizer_eos)
    assert stop_token_ids(ends_of_sequence(model_with_eos(eos)), tokenizer, Sampling(1, **more)) == expected


def test_ignore_eos_ignores_every_stop() -> None:
    sampling = Sampling(1, stop_token_ids=(8,), stop_strings=("x",), ignore_eos=True)
    rules = StopRules.of(model_with_eos(2), SimpleNamespace(eos_token_id=2), sampling)
    assert rules.token_ids == frozenset()
    assert rules.scanner() is None


def test_model_without_generation_config_uses_the_tokenizers_eos() -> None:
    assert stop_token_ids(ends_of_sequence(SimpleNamespace()), SimpleNamespace(eos_token_id=6), Sampling(1)) == {6}


def test_stop_takes_precedence_over_length() -> None:
    rules = StopRules(frozenset({7}), (), TOKENIZER)
    assert rules.reason([1, 7], 2, None) == "stop"
    assert rules.reason([7, 1], 2, None) == "length"
    assert rules.reason([7, 1], 3, None) is None


def first_stop(token_ids: list[int], strings: tuple[str, ...]) -> int | None:
    """Tokens after which the scanner first finds a string."""
    scanner = StopStringScanner(TOKENIZER, strings)
    return next((n for n in range(1, len(token_ids) + 1) if scanner.found(token_ids[:n])), None)


def slow_first_stop(token_ids: list[int], strings: tuple[str, ...]) -> int | None:
    """The same by decoding everything again for every token."""
    for count in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:count], skip_special_tokens=False)
        if not text.endswith("�") and any(string in text for string in strings):
            return count
    return None


@given(
    st.text(alphabet="abcé漢😀 \n", max_size=40),
    st.lists(st.text(alphabet="abcé漢😀", min_size=1, max_size=4), min_size=1),
)
def test_scanner_finds_a_string_at_the_token_that_completes_it(text: str, strings: list[str]) -> None:
    token_ids = TOKENIZER(text).input_ids
    assert first_stop(token_ids, tuple(strings)) == slow_first_stop(token_ids, tuple(strings))


def test_scanner_sees_special_tokens() -> None:
    token_ids = TOKENIZER("ab<|im_end|>cd").input_ids
    assert first_stop(token_ids, ("<|im_end|>",)) == 3


def test_scanner_finds_a_string_across_many_tokens() -> None:
    token_ids = TOKENIZER("thoughts </answer> more").input_ids
    assert first_stop(token_ids, ("</answer>",)) == len("thoughts </answer>")
