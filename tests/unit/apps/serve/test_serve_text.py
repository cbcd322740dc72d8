"""Text as it comes: the pieces add up to the whole, half characters wait, and stop strings are never shown."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from transformers import AutoTokenizer

from posttrain.apps.serve import responses
from posttrain.apps.serve.responses import ListedToken, ResponseChoice, chat_logprobs, completion_logprobs
from posttrain.apps.serve.text import IncrementalText, StopCut, token_bytes
from posttrain.data.tool_calls import Answer, ToolCall, answer_format
from posttrain.engines.native.session import TokenEvent

BYTES = byte_tokenizer()
SMOLLM2 = Path(__file__).parents[4] / "models" / "smollm2-135m-instruct"
TEXTS = ("plain words, 123", "  two  spaces\n\ttab", "ä€🙂 mixed ‘quotes’ 你好", "👩‍👩‍👧 family", "")


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    text = IncrementalText(tokenizer)
    return [*(text.push(token) for token in ids), text.finish()]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    if not SMOLLM2.is_dir():
        pytest.skip("models/smollm2-135m-instruct is not here; `posttrain models fetch smollm2` gets it")
    return AutoTokenizer.from_pretrained(SMOLLM2)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_whole_characters(text: str) -> None:
    found = pieces(BYTES, BYTES(text)["input_ids"])
    assert "".join(found) == text
    assert not any("�" in piece for piece in found)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_real_tokenizer_add_up(smollm2: Any, text: str) -> None:
    found = pieces(smollm2, smollm2(text)["input_ids"])
    assert "".join(found) == text
    assert not any("�" in piece for piece in found)


@given(st.lists(st.integers(0, 259), max_size=60))
def test_incremental_text_equals_decoding_at_once(ids: list[int]) -> None:
    """Also bytes that are no UTF-8, and special tokens, which are left out."""
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=True)


def test_random_tokens_add_up_with_a_real_tokenizer(smollm2: Any) -> None:
    rng = random.Random(0)
    for _ in range(20):
        ids = [rng.randrange(len(smollm2)) for _ in range(50)]
        assert "".join(pieces(smollm2, ids)) == smollm2.decode(ids, skip_special_tokens=True)


def test_custom_decode_of_a_tokenizer_is_used() -> None:
    class Loud(type(BYTES)):  # type: ignore[misc]
        def _decode(self, token_ids: Any, **options: Any) -> str:
            return str(super()._decode(token_ids, **options)).upper()

    loud = Loud(tokenizer_object=BYTES.backend_tokenizer)
    assert "".join(pieces(loud, BYTES("quiet words")["input_ids"])) == "QUIET WORDS"


def test_incomplete_character_is_shown_after_a_while() -> None:
    half = BYTES("🙂")["input_ids"][:1]
    found = pieces(BYTES, half * 100)
    assert max(index for index, piece in enumerate(found) if piece) > 90
    assert min(index for index, piece in enumerate(found) if piece) < 40


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_text_is_cut_before_the_first_stop_string(text: str, strings: list[str], data: st.DataObject) -> None:
    cut, shown, rest = StopCut(strings), "", text
    places = [place for string in strings if (place := text.find(string)) >= 0]
    while rest and not cut.found:
        size = data.draw(st.integers(1, len(rest)))
        shown += cut.push(rest[:size])
        rest = rest[size:]
        # What was shown can never be taken back.
        assert text.startswith(shown)
    shown += cut.finish()
    if places:
        assert cut.found
        # A stop string is found as soon as it is complete: of two, the one that ends first.
        ends = min(text.find(string) + len(string) for string in strings if string in text)
        assert len(shown) <= ends
        assert not any(string in shown for string in strings)
    else:
        assert (shown, cut.found) == (text, False)


def test_prefix_of_a_stop_string_is_held_back_and_then_shown() -> None:
    cut = StopCut(["END"])
    assert [cut.push("so E"), cut.push("N"), cut.push("O"), cut.push("END now")] == ["so ", "", "ENO", ""]
    assert cut.found
    assert cut.push("more") == ""


def test_tokens_have_their_bytes(smollm2: Any) -> None:
    for text in TEXTS:
        assert b"".join(token_bytes(smollm2, token) for token in smollm2(text)["input_ids"]) == text.encode()
    half = BYTES("é")["input_ids"][0]
    assert token_bytes(BYTES, half) == "é".encode()[:1]
    assert token_bytes(BYTES, BYTES.eos_token_id) == b"<|im_end|>"


def event(token: int, reason: Any = None, logprob: float = -1.0) -> TokenEvent:
    return TokenEvent("r", 0, token, logprob, reason, ((token, logprob),))


def test_every_token_has_a_log_probability_and_an_id() -> None:
    """Also the one that ends the answer."""
    ids = BYTES("a🙂b")["input_ids"]
    choice = ResponseChoice(3, BYTES, (), frozenset({BYTES.eos_token_id}), lists_logprobs=True, lists_ids=True)
    found = [choice.push(event(token)) for token in ids]
    found.append(choice.push(event(BYTES.eos_token_id, "stop")))
    assert [(piece.text, len(piece.logprobs)) for piece in found] == [
        ("a", 1), ("", 1), ("", 1), ("", 1), ("🙂", 1), ("b", 1), ("", 1),
    ]  # fmt: skip
    assert [token for piece in found for token in piece.token_ids] == [*ids, BYTES.eos_token_id]
    assert found[-1].finish_reason == "stop"
    assert all(piece.index == 3 for piece in found)
    written = chat_logprobs(BYTES, tuple(entry for piece in found for entry in piece.logprobs))["content"]
    assert bytes(byte for entry in written for byte in entry["bytes"]).decode() == "a🙂b<|im_end|>"
    assert written[0]["top_logprobs"] == [{"token": "a", "logprob": -1.0, "bytes": [97]}]
    plain = completion_logprobs(BYTES, tuple(entry for piece in found for entry in piece.logprobs))
    assert plain["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82", "b", "<|im_end|>"]
    assert plain["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert chat_logprobs(BYTES, found[0].logprobs, as_ids=True)["content"][0]["token"] == f"token_id:{ids[0]}"


def test_offsets_are_positions_in_the_text() -> None:
    """Also after special tokens, which are not part of it, and where text waits because it may be a stop string."""
    answer = "ä€x stop here 🙂."
    ids = [token for text in answer for token in [*BYTES(text)["input_ids"], BYTES.pad_token_id]]
    choice = ResponseChoice(0, BYTES, ("here you are",), frozenset(), lists_logprobs=True)
    found = [choice.push(event(token, "length" if place == len(ids) - 1 else None)) for place, token in enumerate(ids)]
    assert "".join(piece.text for piece in found) == answer
    plain = completion_logprobs(BYTES, tuple(entry for piece in found for entry in piece.logprobs))
    assert [token for token in plain["tokens"] if token.startswith("bytes:")]
    for token, offset in zip(plain["tokens"], plain["text_offset"], strict=True):
        if len(token) == 1:
            assert answer[offset] == token
    starts = [
        offset for token, offset in zip(plain["tokens"], plain["text_offset"], strict=True) if token != BYTES.pad_token
    ]
    assert sorted(set(starts)) == list(range(len(answer)))


def test_more_probable_of_two_tokens_with_equal_text_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "token_bytes", lambda tokenizer, token_id: b"same" if token_id < 7 else b"other")
    top = ((5, -0.5), (6, -2.0), (7, -3.0))
    written = completion_logprobs(BYTES, (ListedToken(5, -0.5, top, 0),))
    assert written["top_logprobs"] == [{"same": -0.5, "other": -3.0}]


def test_choice_that_ends_mid_character_returns_all_text() -> None:
    ids = BYTES("x🙂")["input_ids"][:3]
    choice = ResponseChoice(0, BYTES, ("xyz",), frozenset())
    texts = [choice.push(event(token)).text for token in ids[:-1]]
    last = choice.push(event(ids[-1], "length"))
    assert "".join([*texts, last.text]) == "x�"
    assert last.finish_reason == "length"


def test_stop_string_found_in_the_text_ends_the_choice() -> None:
    """A special token in its middle hides it from the engine, and is not part of the text."""
    a, b = BYTES("ab")["input_ids"]
    choice = ResponseChoice(0, BYTES, ("ab",), frozenset())
    texts = [choice.push(event(token)).text for token in (a, BYTES.pad_token_id)]
    last = choice.push(event(b))
    assert ("".join(texts) + last.text, last.finish_reason) == ("", "stop")


def answer_of(ids: list[int], stop: str, reason: Any = None) -> list[responses.Piece]:
    """The pieces of an answer until its stop string is found, or until `reason` ends it."""
    choice = ResponseChoice(0, BYTES, (stop,), frozenset({BYTES.eos_token_id}), lists_logprobs=True)
    found: list[responses.Piece] = []
    for place, token in enumerate(ids):
        found.append(choice.push(event(token, reason if place == len(ids) - 1 else None)))
        if choice.finish_reason is not None:
            break
    return found


@pytest.mark.parametrize("reason", [None, "stop", "length"])
def test_tokens_of_a_stop_string_are_listed_and_not_shown(reason: Any) -> None:
    """As many log-probabilities as tokens were counted, so that both can be aligned with ids."""
    ids = BYTES("Ena 🙂 END")["input_ids"]
    found = answer_of(ids, "END", reason)
    assert "".join(piece.text for piece in found) == "Ena 🙂 "
    assert [token.token_id for piece in found for token in piece.logprobs] == ids
    assert found[-1].finish_reason == "stop"


def test_stop_string_found_by_the_engine_is_listed() -> None:
    """It is a special token, which is not part of the text."""
    ids = [*BYTES("ab")["input_ids"], BYTES.pad_token_id]
    found = answer_of(ids, BYTES.pad_token, "stop")
    assert "".join(piece.text for piece in found) == "ab"
    assert [token.token_id for piece in found for token in piece.logprobs] == ids


def test_calls_and_reasoning_are_pieces_of_their_own() -> None:
    form = answer_format("<tool_call><think></think>", writes_tools=True)
    text = '<think>Hm.</think>So. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    choice = ResponseChoice(0, BYTES, (), frozenset({BYTES.eos_token_id}), reader=form.reader(), hidden=frozenset())
    found = [choice.push(event(token)) for token in BYTES(text)["input_ids"]]
    found.append(choice.push(event(BYTES.eos_token_id, "stop")))
    whole = found[0]
    for piece in found[1:]:
        whole = whole.then(piece)
    assert (whole.text, whole.finish_reason) == ("So.", "tool_calls")
    assert whole.answer == Answer("So.", "Hm.", (ToolCall("f", {}),))
    assert len([piece for piece in found if not piece.is_empty]) < len("Hm.So.") + 3, "markers are held back"
