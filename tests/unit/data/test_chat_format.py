"""What the model is trained on is what it is sampled from, token for token, whatever the template does."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_tokenizers import CHATML, THINKING, TWO_ENDS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from posttrain.data.chat import ChatFormat, images_of, without_images
from posttrain.data.errors import DataError

ASK = [{"role": "user", "content": "2+2?"}]


def test_prompt_ends_with_the_opening_of_the_answer() -> None:
    chat = ChatFormat(byte_tokenizer(CHATML))
    text, ids = chat.prompt(ASK)
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(ids) == text
    assert ids.count(chat.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2  # special tokens, not their letters


def test_response_ends_with_its_end_of_turn_and_nothing_after_it() -> None:
    chat = ChatFormat(byte_tokenizer(CHATML))
    prompt, response = chat.turn(ASK, "4")
    assert prompt == chat.prompt(ASK)[1]
    assert chat.tokenizer.decode(response) == "4<|im_end|>"
    assert response[-1] == chat.tokenizer.eos_token_id


def test_end_of_turn_is_the_first_special_token_after_the_answer() -> None:
    chat = ChatFormat(byte_tokenizer(TWO_ENDS, eos_token="<eos>"))
    assert chat.end_of_turn == "<|im_end|>"
    assert chat.tokenizer.decode(chat.turn(ASK, " 4 ")[1]) == "4<|im_end|>"  # this template trims
    assert set(chat.stop_token_ids) == {chat.tokenizer.eos_token_id, chat.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_what_the_template_adds_before_an_answer_belongs_to_the_answer() -> None:
    chat = ChatFormat(byte_tokenizer(THINKING))
    assert chat.tokenizer.decode(chat.turn(ASK, "4")[1]) == "<think></think>4<|im_end|>"


def test_answer_follows_the_opening_when_a_finished_turn_is_written_differently() -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    chat = ChatFormat(byte_tokenizer(template))
    prompt, response = chat.turn(ASK, "so 4")
    assert chat.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    assert chat.tokenizer.decode(response) == "so 4<|im_end|>"


def test_template_without_an_end_of_turn_gets_the_eos_token() -> None:
    template = "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    chat = ChatFormat(byte_tokenizer(template, eos_token="<eos>"))
    assert chat.tokenizer.decode(chat.turn(ASK, "4")[1]) == "assistant:4<eos>"


@pytest.mark.parametrize("template", ["default", None])
def test_contents_stand_one_after_another_without_a_template(template: str | None) -> None:
    chat = ChatFormat(byte_tokenizer(None, eos_token="<eos>"), template)
    messages = [{"role": "system", "content": "Add. "}, *ASK]
    assert chat.prompt(messages)[0] == "Add. 2+2?"
    prompt, response = chat.turn(messages, "4")
    assert chat.tokenizer.decode(prompt) == "Add. 2+2?"
    assert chat.tokenizer.decode(response) == "4<eos>"


def test_null_template_passes_content_through_even_if_the_model_has_one() -> None:
    assert ChatFormat(byte_tokenizer(CHATML), None).prompt(ASK)[0] == "2+2?"


def test_plain_text_starts_as_the_tokenizer_starts_it() -> None:
    tokenizer = byte_tokenizer(None, eos_token="<eos>", bos_token="<|im_start|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    text, ids = ChatFormat(tokenizer).prompt(ASK)
    assert text == "<|im_start|>2+2?"
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_template_prints_its_own_start_token_once() -> None:
    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML, bos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", tokenizer.bos_token_id)]
    )
    assert ChatFormat(tokenizer).prompt(ASK)[1].count(tokenizer.bos_token_id) == 1


def test_boundary_between_prompt_and_answer_survives_a_merging_tokenizer() -> None:
    # ": " is one token of this tokenizer, but a sampler that has read "A:" can only go on with " ".
    chat = ChatFormat(byte_tokenizer(None, merges=((":", "Ġ"),), eos_token="<eos>"))
    question = [{"role": "user", "content": "A:"}]
    assert len(chat.tokenizer("A: 4")["input_ids"]) == 3  # the merge is real
    prompt, response = chat.turn(question, " 4")
    assert prompt == chat.prompt(question)[1]
    assert chat.tokenizer.convert_ids_to_tokens(response) == ["Ġ", "4", "<eos>"]


@given(question=st.text(max_size=20), answer=st.text(min_size=1, max_size=20))
def test_prompt_tokens_do_not_depend_on_the_answer(question: str, answer: str) -> None:
    for chat in (CHAT, MERGING):
        messages = [{"role": "user", "content": question}]
        prompt, response = chat.turn(messages, answer)
        assert prompt == chat.prompt(messages)[1]
        assert chat.tokenizer.decode(response).endswith(chat.end_of_turn)
        both = chat.split_turns([chat.render_turn(messages, answer), chat.render_turn(ASK, "4")])
        assert [turn[:2] for turn in both] == [(prompt, response), chat.turn(ASK, "4")]


CHAT = ChatFormat(byte_tokenizer(CHATML))
MERGING = ChatFormat(byte_tokenizer(None, merges=(("a", "a"), ("Ġ", "a"), ("Ċ", "Ċ")), eos_token="<eos>"))


def test_template_comes_from_a_file_or_inline(tmp_path: Path) -> None:
    inline = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    file = tmp_path / "mine.jinja"
    file.write_text(inline)
    tokenizer = byte_tokenizer(CHATML)
    assert ChatFormat(tokenizer, inline).prompt(ASK)[0] == ChatFormat(tokenizer, str(file)).prompt(ASK)[0] == "[2+2?]"


@pytest.mark.parametrize("is_special", [True, False])
def test_extra_id_template_writes_what_nemo_aligner_documents(is_special: bool) -> None:
    tokenizer = byte_tokenizer(CHATML)
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"]})
    chat = ChatFormat(tokenizer, "extra_id")
    opened = "<extra_id_0>System\n\n<extra_id_1>User\n2+2?\n<extra_id_1>Assistant\n"
    assert chat.render_turn(ASK, "4") == (opened, "4\n<extra_id_1>")
    assert chat.templated_turn(opened, "4\n<extra_id_1>") == (opened, "4\n<extra_id_1>"), (
        "rows in the template are as they are"
    )
    turns = [{"role": "system", "content": "Be terse."}, *ASK, {"role": "assistant", "content": "4"}]
    assert chat.render([*turns, {"role": "user", "content": "3+3?"}]) == (
        "<extra_id_0>System\nBe terse.\n<extra_id_1>User\n2+2?\n<extra_id_1>Assistant\n4\n"
        "<extra_id_1>User\n3+3?\n<extra_id_1>Assistant\n"
    )
    with pytest.raises(DataError, match="system, user and assistant, not tool"):
        chat.render([*turns, {"role": "tool", "content": "6"}])


def test_template_arguments_reach_the_template() -> None:
    template = "{{ style }}" + CHATML
    assert ChatFormat(byte_tokenizer(template), "default", {"style": "terse "}).prompt(ASK)[0].startswith("terse ")


@pytest.mark.parametrize(
    ("template", "kwargs", "complaint"),
    [
        ("chatml", {}, "neither 'default', null"),
        ("missing.jinja", {}, "file not found: missing.jinja"),
        ("{% if %}", {}, "not valid Jinja, line 1"),
        ("default", {"add_generation_prompt": False}, "'add_generation_prompt' is set by posttrain"),
        ("{{ raise_exception('no system turn') }}", {}, "no system turn"),
        ("{{ 1 / 0 }}", {}, "the chat template refuses a conversation with the roles .*: division by zero"),
        ("{{ messages[0]['content'].index('#') }}", {}, "the chat template refuses .*: substring not found"),
    ],
)
def test_template_that_cannot_be_used_is_refused_at_once(
    template: str, kwargs: dict[str, bool], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        ChatFormat(byte_tokenizer(CHATML), template, kwargs)


def test_a_message_of_calls_without_text_has_no_images() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert images_of(messages) == []
    assert without_images(messages) == messages
