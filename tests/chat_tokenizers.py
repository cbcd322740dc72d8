"""Tokenizers of a few hundred tokens, made on the spot: one token per byte, and whatever merges a test asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}"
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
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] | trim + "
    "'<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% else %}{{ eos_token }}{% endif %}"
)


def byte_tokenizer(
    template: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
    special_tokens: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<eos>"),
    **special: str,
) -> Any:
    """`merges` are written with visible bytes: a space is Ġ, a line break Ċ."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special.pop("eos_token", "<|im_end|>"), **special
    )
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True)
class TemplateFamily:
    """A chat template as one family of models has it, in shape and special tokens; the wording is ours."""

    template: str
    special: tuple[str, ...]
    end: str  # the tokenizer's EOS
    start: str | None = None  # the tokenizer's BOS
    kwargs: dict[str, Any] = field(default_factory=dict)
    has_system: bool = True

    def tokenizer(self) -> Any:
        start = {} if self.start is None else {"bos_token": self.start}
        return byte_tokenizer(
            self.template, special_tokens=self.special, eos_token=self.end, pad_token=self.end, **start
        )


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers “exactly” 🙂; {% braces %} and a \\ are text.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}

TEMPLATE_FAMILIES = {
    # BOS in the template, a system turn that is always there, headers.
    "llama": TemplateFamily(
        "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set first = '' %}{%- endif %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string | default('1 Jan 2025') + '\n\n' + "
        "first }}"
        "{{- '<|eot_id|>' }}{%- for m in messages %}"
        "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{%- "
        "endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        start="<|begin_of_text|>",
        kwargs={"date_string": "2 Feb 2026"},
    ),
    # A system turn by default, tools in it.
    "qwen": TemplateFamily(
        "{%- set own = messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' }}"
        "{{- messages[0]['content'] if own else 'You are helpful.' }}"
        "{%- if tools %}{{- '\n\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor "
        "%}"
        "{{- '\n</tools>' }}{%- endif %}{{- '<|im_end|>\n' }}"
        "{%- for m in messages %}{%- if not (loop.first and own) %}"
        "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        end="<|im_end|>",
        kwargs={"tools": [CALCULATOR], "enable_thinking": False},
    ),
    # Roles by turns, the assistant is called model, no system role.
    "gemma": TemplateFamily(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        end="<eos>",
        start="<bos>",
        has_system=False,
    ),
    # The system's text stands before the last question; nothing opens an answer.
    "mistral": TemplateFamily(
        "{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] + '\n\n' %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set first = '' %}{%- endif %}{{- bos_token }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}"
        "{{- '[INST] ' + (first if loop.last or loop.index0 == messages | length - 2 else '') + m['content'] + ' "
        "[/INST]' }}"
        "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        end="</s>",
        start="<s>",
    ),
    # One token for each role; the end of the text follows the end of the turn.
    "phi": TemplateFamily(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        end="<|endoftext|>",
    ),
}
