"""Tokenizers of a few hundred tokens, made on the spot: one token per byte, and whatever merges a test asks for."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Like Qwen3's: history without thoughts, a last answer with an empty thought when it has none.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% set answer = message['content'].split('</think>')[-1] %}"
    "{% if loop.last and message['role'] == 'assistant' %}"
    "{{ (message['content'] if '</think>' in message['content'] else '<think></think>' + answer) + '<|im_end|>\n' }}"
    "{% else %}{{ answer + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Like Phi-3's: the end of the text follows the end of the turn.
TWO_ENDS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% else %}{{ eos_token }}{% endif %}"
)


def byte_tokenizer(template: str | None = None, merges: tuple[tuple[str, str], ...] = (), **special: str) -> Any:
    """`merges` are written with visible bytes: a space is Ġ, a line break Ċ."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<eos>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special.pop("eos_token", "<|im_end|>"), **special
    )
    tokenizer.chat_template = template
    return tokenizer
