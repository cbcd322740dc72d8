"""The template that gpt-oss is published with, from the package trl, in prompts, answers and conversations."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import byte_tokenizer

from posttrain.data.chat import ChatFormat

SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
OPENING = "<|start|>assistant"


@pytest.fixture
def chat() -> ChatFormat:
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("trl, which holds the template, is not installed here (it is with the extra bench)")
    template = Path(package.origin).parent / "chat_templates" / "gptoss.jinja"
    return ChatFormat(byte_tokenizer(template.read_text(), special_tokens=SPECIAL, eos_token="<|return|>"))


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_a_prompt_is_that_of_transformers(chat: ChatFormat, tools: list[Any]) -> None:
    text = chat.render(ASK, tools)
    tokenizer: Any = chat.tokenizer
    assert text == tokenizer.apply_chat_template(ASK, tools=tools or None, tokenize=False, add_generation_prompt=True)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in text
    assert text.endswith(f"<|start|>user<|message|>2+2?<|end|>{OPENING}")
    assert ("type add = (_: {" in text) == bool(tools)


def test_an_answer_begins_with_its_channel_and_ends_with_return(chat: ChatFormat) -> None:
    prompt, answer = chat.turn(ASK, "4")
    assert prompt == chat.prompt(ASK)[1]
    assert chat.tokenizer.decode(answer) == "<|channel|>final<|message|>4<|return|>"
    assert chat.end_of_turn == "<|return|>"
    assert answer[-1] in chat.stop_token_ids


def test_thoughts_are_kept_in_the_last_answer_alone(chat: ChatFormat) -> None:
    answers = [
        {"role": "assistant", "content": text, "thinking": thought} for text, thought in (("4", "a"), ("6", "b"))
    ]
    text, spans = chat.render_conversation([*ASK, answers[0], {"role": "user", "content": "3+3?"}, answers[1]])
    assert text.count("<|channel|>analysis<|message|>") == 1
    assert text.endswith(
        f"{OPENING}<|channel|>analysis<|message|>b<|end|>{OPENING}<|channel|>final<|message|>6<|return|>"
    )
    trained = [text[span.start : span.stop] for span in spans]
    assert trained[0].startswith("<|channel|>final<|message|>4")
    assert trained[-1].endswith("6<|return|>")
