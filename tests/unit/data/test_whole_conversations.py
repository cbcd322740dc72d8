"""What a reward model reads is what `apply_chat_template` writes, to the last token."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import CHATML, THINKING, TWO_ENDS, byte_tokenizer

from posttrain.data.chat import ChatFormat, WholeChatFormat

QUESTION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1 + 1?"}]
MERGES = (("Ċ", "Ċ"), ("Ċ", "a"), ("b", "<"))  # across the line break that opens an answer


def whole_tokens(tokenizer: Any, answer: str) -> list[int]:
    messages = [*QUESTION, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("template", [CHATML, THINKING, TWO_ENDS], ids=["chatml", "thinking", "two ends"])
@pytest.mark.parametrize("merges", [(), MERGES], ids=["bytes", "merges"])
@pytest.mark.parametrize("answer", ["two", "", "\na line", "ab", "<think>hm</think>2"])
def test_prompt_and_response_are_the_tokens_of_the_finished_conversation(
    template: str, merges: tuple[tuple[str, str], ...], answer: str
) -> None:
    tokenizer = byte_tokenizer(template, merges)
    prompt, response = WholeChatFormat(tokenizer).turn(QUESTION, answer)
    assert [*prompt, *response] == whole_tokens(tokenizer, answer)
    assert prompt
    assert response


def test_both_answers_of_a_pair_have_one_prompt_even_where_one_merges_with_it() -> None:
    tokenizer = byte_tokenizer(CHATML, MERGES)
    chat = WholeChatFormat(tokenizer)
    (prompt, chosen, _), (other, rejected, _) = chat.split_turns(
        [chat.render_turn(QUESTION, answer) for answer in ("abc", "xyz")]
    )
    assert prompt == other
    assert len(prompt) < len(chat.prompt(QUESTION)[1]), "the token that merged is no longer part of it"
    assert [*prompt, *chosen] == whole_tokens(tokenizer, "abc")
    assert [*prompt, *rejected] == whole_tokens(tokenizer, "xyz")


def test_what_the_template_prints_after_the_turn_is_kept_and_is_among_the_last_tokens() -> None:
    tokenizer = byte_tokenizer(CHATML)
    whole, trained = WholeChatFormat(tokenizer), ChatFormat(tokenizer)
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert whole.turn(QUESTION, "two")[1] == trained.turn(QUESTION, "two")[1] + line_break
    assert set(whole.last_token_ids) == {tokenizer.eos_token_id, *line_break}


def test_without_a_template_an_answer_ends_with_the_end_of_the_text() -> None:
    tokenizer = byte_tokenizer()
    prompt, response = WholeChatFormat(tokenizer, None).turn([{"role": "user", "content": "a"}], "b")
    assert tokenizer.decode([*prompt, *response]) == "ab<|im_end|>"


def test_packs_made_for_a_language_model_are_recognised() -> None:
    tokenizer = byte_tokenizer(CHATML)
    whole, trained = WholeChatFormat(tokenizer).fingerprints, ChatFormat(tokenizer).fingerprints
    assert whole["tokenizer"] == trained["tokenizer"]
    assert whole["template"] != trained["template"]
