"""Templates of vision-language models that write a content only if it is a list of parts (SmolVLM's)."""

from __future__ import annotations

import pytest
from tiny_vision import image_ref, vision_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError

_PARTS_ONLY = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def test_texts_reach_a_template_that_reads_parts_only() -> None:
    chat = ChatFormat(vision_tokenizer("smolvlm"), _PARTS_ONLY)
    assert chat.render([{"role": "user", "content": "Hi"}]) == "<|im_start|>User: Hi<|im_end|>\nAssistant:"
    assert chat.end_of_turn == "<|im_end|>"
    assert chat.render_turn([{"role": "user", "content": "Hi"}], "yes")[1] == " yes<|im_end|>"


def test_images_and_texts_together() -> None:
    chat = ChatFormat(vision_tokenizer("smolvlm"), _PARTS_ONLY)
    chat.image_tokens = lambda text, images: text.replace("<image>", "[" + "#" * len(images) + "]")
    parts = [{"type": "image", "image": image_ref(8, 8)}, {"type": "text", "text": "what?"}]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    expected = "<|im_start|>System: Look.<|im_end|>\nUser:[#]what?<|im_end|>\nAssistant:"
    assert chat.render(messages) == expected


def test_a_template_without_contents_stays_as_it_is() -> None:
    chat = ChatFormat(vision_tokenizer("smolvlm"), "{% for message in messages %}x{% endfor %}")
    assert chat.render([{"role": "user", "content": "Hi"}]) == "x"
    with pytest.raises(DataError, match="reads text only"):
        chat.render([{"role": "user", "content": [{"type": "image", "image": image_ref(8, 8)}]}])
