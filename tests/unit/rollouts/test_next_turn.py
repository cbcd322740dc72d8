"""Token in, token out: the prompt of a later turn, over several chat templates and tokenizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import ScriptedTasks
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.rollouts.turn_prompts import Exchange, NextTurn, ToolPrompts
from posttrain.types import Message, Task

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|bos|>{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
# Refuses other roles than user and model by turns.
GEMMA = (
    "<|bos|>{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|start|>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
# Ends a turn with a space and the end of sequence.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }} <|im_end|>"
    "{% else %}<|bos|>[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
# Writes a chain of thought only while the conversation has not gone on.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% elif m['role'] == 'tool' %}<tool_response>\n{{ m['content'] }}\n</tool_response>{% else %}{{ m['content'] }}{% "
    "endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "llama2": LLAMA2, "qwen3": QWEN3}
ASKED: list[Message] = [{"role": "user", "content": "What is 17 * 23?"}]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE that has learnt merges over line breaks and words, so that the same text can be cut in several ways."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["assistant\nWhat is the answer?\ntool\n391\n\nuser\nIt is 17 * 23 = 391.\n [INST] 391 [/INST] " * 3]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    special = ["<|im_start|>", "<|bos|>", "<|start|>", "<|stop|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


@pytest.fixture(scope="module", params=["bytes", "merges"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "merges":
        return merging_tokenizer()
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|bos|>", "<|start|>", "<|stop|>", "<|eot|>"]})
    return made


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_next_prompt_is_the_whole_conversation_and_nothing_earlier_changes(tokenizer: Any, name: str) -> None:
    chat = ChatFormat(tokenizer, TEMPLATES[name])
    renderer = NextTurn(chat)
    _, tokens = chat.prompt(ASKED)
    messages, said = list(ASKED), []
    for observation in ("391", "really"):
        answer = f"I say {observation}"
        # As a sampler might: character by character, not in the pieces that the tokenizer would choose.
        sampled = [token for character in answer for token in ids_of(tokenizer, character)]
        sampled.append(ids_of(tokenizer, chat.end_of_turn)[-1])
        said.append(Exchange(({"role": "", "content": observation},)))
        before = tokens + sampled
        tokens = before + renderer.ids(ASKED, said, sampled)
        assert tokens[: len(before)] == before
        messages += [{"role": "assistant", "content": answer}, {"role": renderer.role, "content": observation}]
    # Two turns later the text is what the template writes for the whole conversation.
    written = chat.render(messages)
    if name == "llama2":  # the space that this template prints before an end and after a header is nobody's
        assert tokenizer.decode(tokens).replace(" ", "") == written.replace(" ", "")
    else:
        assert tokenizer.decode(tokens) == written


def test_canonical_tokens_give_the_tokens_of_the_whole_rendering(tokenizer: Any) -> None:
    for name in ("chatml", "llama3", "gemma", "qwen3"):
        chat = ChatFormat(tokenizer, TEMPLATES[name])
        renderer = NextTurn(chat)
        messages = [*ASKED, {"role": "assistant", "content": "Hm."}, {"role": renderer.role, "content": "391"}]
        _, prompt = chat.prompt(ASKED)
        sampled = ids_of(tokenizer, "Hm." + chat.end_of_turn)
        added = renderer.ids(ASKED, [Exchange(({"role": "", "content": "391"},))], sampled)
        assert prompt + sampled + added == chat.prompt(messages)[1], name


def test_unfinished_turn_is_closed_before_the_observation(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, CHATML)
    renderer = NextTurn(chat)
    exchange = Exchange(({"role": "user", "content": "391"},))
    end = ids_of(tokenizer, "<|im_end|>")
    closed = renderer.ids(ASKED, [exchange], [*ids_of(tokenizer, "x"), *end])
    assert renderer.ids(ASKED, [exchange], ids_of(tokenizer, "x</tool_call>")) == end + closed
    assert tokenizer.decode(closed) == "\n<|im_start|>user\n391<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_the_observation_follows_as_it_is(tokenizer: Any) -> None:
    renderer = NextTurn(ChatFormat(tokenizer, None))
    added = renderer.ids(ASKED, [Exchange(({"role": "", "content": " = 391"},))], ids_of(tokenizer, "x"))
    assert tokenizer.decode(added) == " = 391"


@pytest.mark.parametrize(
    ("name", "role"), [("chatml", "tool"), ("llama3", "tool"), ("gemma", "user"), ("qwen3", "tool")]
)
def test_the_role_of_an_observation_is_one_that_the_template_takes(tokenizer: Any, name: str, role: str) -> None:
    assert NextTurn(ChatFormat(tokenizer, TEMPLATES[name])).role == role


def test_template_that_rewrites_earlier_turns_sets_the_caution_and_keeps_sampled_tokens(tokenizer: Any) -> None:
    assert NextTurn(ChatFormat(tokenizer, CHATML)).caution is None
    assert NextTurn(ChatFormat(tokenizer, LLAMA3)).caution is None
    chat = ChatFormat(tokenizer, QWEN3)
    renderer = NextTurn(chat)
    assert "chain of thought" in str(renderer.caution)
    sampled = ids_of(tokenizer, "<think>\nhard\n</think>\n\n391<|im_end|>")
    _, prompt = chat.prompt(ASKED)
    tokens = prompt + sampled + renderer.ids(ASKED, [Exchange(({"role": "", "content": "ok"},))], sampled)
    assert "hard" in tokenizer.decode(tokens)
    thought = {"role": "assistant", "content": "<think>\nhard\n</think>\n\n391"}
    thinking = [*ASKED, thought, {"role": "tool", "content": "ok"}]
    assert "hard" not in chat.render(thinking), "the template itself would have dropped it"


def test_template_without_earlier_turns_is_refused(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, FORGETFUL)
    with pytest.raises(DataError, match="leaves out earlier turns of the assistant"):
        NextTurn(chat)


def test_tools_are_written_by_the_template_or_a_system_message(tokenizer: Any) -> None:
    schema = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    task = Task(0, "t:0", "", (), messages=tuple(ASKED), environment="calc")
    other = replace(task, environment="math")
    for template, system in ((WITH_TOOLS, False), (CHATML, True)):
        chat = ChatFormat(tokenizer, template)
        stream = ToolPrompts(ScriptedTasks([task, other]), chat, frozenset({"calc"}), lambda name: [schema])
        described, plain = stream.take(2)
        assert plain == other
        assert "calculator" in described.prompt
        assert list(described.prompt_ids) == ids_of(tokenizer, described.prompt)
        assert (described.messages[0]["role"] == "system") is system
        assert ("<tool_call>" in described.prompt) is system
    kept = ToolPrompts(
        ScriptedTasks([replace(task, messages=({"role": "system", "content": "Be brief."}, *ASKED))]),
        ChatFormat(tokenizer, CHATML),
        frozenset({"calc"}),
        lambda name: [schema],
    ).take(1)[0]
    assert [message["role"] for message in kept.messages] == ["system", "user"]
    assert kept.messages[0]["content"].startswith("Be brief.\n\nYou can use")
