"""Supervised examples: exactly the assistant's turns are trained, with their ends, whatever the template does."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, THINKING, TWO_ENDS, byte_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import ExampleDataset, load_example_dataset
from posttrain.data.errors import DataError
from posttrain.types import Example

CHAT = ChatFormat(byte_tokenizer(CHATML))
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "assistant"},  # a word that also stands in the template
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},  # the same answer twice
    {"role": "user", "content": "bye"},
]


def load(
    folder: Path,
    rows: list[dict[str, Any]],
    chat: ChatFormat = CHAT,
    limit: int = 1000,
    final: bool = False,
    **entry: Any,
) -> ExampleDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_example_dataset(
        {"data_path": str(file), **entry}, None, chat, max_total_tokens=limit, only_unmask_final=final, seed=0
    )


def show(example: Example, chat: ChatFormat = CHAT) -> tuple[str, str]:
    """The whole text, and the trained part of it with | between the pieces."""
    mask = example.mask or (True,) * len(example.response_ids)
    assert len(mask) == len(example.response_ids)
    assert mask[0], "the prompt is everything before the first trained token"
    trained_text, previous = "", False
    for token, trained in zip(example.response_ids, mask, strict=True):
        if trained:
            trained_text += ("" if previous else "|") + chat.tokenizer.decode([token])
        previous = trained
    return chat.tokenizer.decode([*example.prompt_ids, *example.response_ids]), trained_text


def test_input_and_output_rows_train_the_output(tmp_path: Path) -> None:
    example = load(tmp_path, [{"input": "2+2?", "output": "4"}])[0]
    assert show(example) == ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>", "|4<|im_end|>")


def test_every_assistant_turn_is_trained_with_its_end(tmp_path: Path) -> None:
    text, trained = show(load(tmp_path, [{"messages": TALK}])[0])
    assert trained == "|a<|im_end|>|a<|im_end|>"
    assert text == CHAT.tokenizer.apply_chat_template(TALK[:5], tokenize=False).removesuffix("\n")


def test_only_the_last_turn_is_trained_when_asked(tmp_path: Path) -> None:
    example = load(tmp_path, [{"messages": TALK}], final=True)[0]
    text, trained = show(example)
    assert trained == "|a<|im_end|>"
    assert list(example.prompt_ids) == CHAT.prompt(TALK[:4])[1]
    assert text == CHAT.prompt(TALK[:4])[0] + "a<|im_end|>"


def test_template_that_rewrites_history_is_followed(tmp_path: Path) -> None:
    chat = ChatFormat(byte_tokenizer(THINKING))
    text, trained = show(load(tmp_path, [{"messages": TALK}], chat)[0], chat)
    assert text == chat.tokenizer.apply_chat_template(TALK[:5], tokenize=False).removesuffix("\n")
    assert trained == "|a<|im_end|>|<think></think>a<|im_end|>"

    thoughtful = [{**turn, "content": "<think>hm</think>a"} if turn["role"] == "assistant" else turn for turn in TALK]
    text, trained = show(load(tmp_path, [{"messages": thoughtful}], chat)[0], chat)
    assert text == chat.tokenizer.apply_chat_template(thoughtful[:5], tokenize=False).removesuffix("\n")
    assert trained == "|a<|im_end|>|<think>hm</think>a<|im_end|>"


def test_text_after_the_last_end_of_turn_is_left_out(tmp_path: Path) -> None:
    chat = ChatFormat(byte_tokenizer(TWO_ENDS, eos_token="<eos>"))
    text, trained = show(load(tmp_path, [{"messages": TALK}], chat)[0], chat)
    assert text.endswith("assistant a<|im_end|>")
    assert trained == "|a<|im_end|>|a<|im_end|>"


def test_plain_text_without_template_ends_with_eos(tmp_path: Path) -> None:
    chat = ChatFormat(byte_tokenizer(None, eos_token="<eos>"))
    text, trained = show(load(tmp_path, [{"messages": TALK}], chat)[0], chat)
    assert text == "Sassistantaqa<eos>"
    assert trained == "|a|a<eos>"


def test_template_that_changes_an_answer_is_refused_with_the_turn(tmp_path: Path) -> None:
    template = CHATML.replace("message['content']", "message['content'] | upper")
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: .*turn 3 .assistant.*train on the last turn only"):
        load(tmp_path, [{"messages": TALK}], ChatFormat(byte_tokenizer(template)))


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    silent = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"function": "f"}]}]
    examples = load(tmp_path, [{"messages": TALK[:2]}, {"messages": silent}, {"messages": TALK}])
    assert len(examples) == 1
    assert examples.dropped == {"no assistant turn to learn from": 2}


def test_long_examples_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"input": "q", "output": "a" * length} for length in (5, 6)]
    limit = len(CHAT.prompt([{"role": "user", "content": "q"}])[1]) + 5 + 1
    examples = load(tmp_path, rows, limit=limit)
    assert len(examples) == 1
    assert examples.dropped == {f"longer than {limit} tokens": 1}


@pytest.mark.parametrize(
    "part", [{"type": "video", "video": "/etc/passwd"}, {"type": "input_audio"}, {"image": "a.png"}]
)
def test_a_part_that_is_no_text_is_refused_with_its_row(part: dict[str, str], tmp_path: Path) -> None:
    fine = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    shown = [{"role": "user", "content": [part, {"type": "text", "text": "2?"}]}, {"role": "assistant", "content": "4"}]
    with pytest.raises(DataError, match=r"row 2: message 1 of 'messages' has a part of type .*; text is read here"):
        load(tmp_path, [{"messages": fine}, {"messages": shown}])


def test_content_in_parts_is_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    example = load(
        tmp_path, [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "4"}]}]
    )[0]
    assert "2+2?" in show(example)[0]


def test_columns_for_conversation_and_system_are_chosen_by_key(tmp_path: Path) -> None:
    row = {"talk": TALK[1:3], "sys": "Be kind."}
    text, _ = show(load(tmp_path, [row], chat_key="talk", system_key="sys", dataset_name="openai_format")[0])
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nassistant<|im_end|>")
    with pytest.raises(DataError, match=r"no key 'talks' .did you mean 'talk'.*`chat_key`"):
        load(tmp_path, [row], chat_key="talks")


def test_named_dataset_teaches_the_worked_solution(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "so 7\n#### 7"}
    assert show(load(tmp_path, [row], dataset_name="gsm8k")[0])[1] == "|so 7\n#### 7<|im_end|>"
    row = {"problem": "q", "answer": "7", "solution": None}
    assert show(load(tmp_path, [row], dataset_name="DeepScaler")[0])[1] == "|7<|im_end|>"


@pytest.mark.parametrize("merges", [(), ((":", "Ġ"),), ((":", "Ġ"), ("Ġ", "n"))])
def test_turns_keep_their_tokens_when_the_tokenizer_merges_across_them(
    tmp_path: Path, merges: tuple[tuple[str, str], ...]
) -> None:
    template = (
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    chat = ChatFormat(byte_tokenizer(template, merges=merges, eos_token="<eos>"))
    talk = [TALK[1], {"role": "assistant", "content": " no"}, TALK[3], {"role": "assistant", "content": " no"}]
    example = load(tmp_path, [{"messages": talk}], chat)[0]
    assert show(example, chat)[1] == "| no| no<eos>"
    # The first answer starts where a sampler that was given its prompt would start.
    prompt, answer = chat.turn(talk[:1], " no")
    assert list(example.prompt_ids) == prompt
    assert list(example.response_ids[: len(answer) - 1]) == answer[:-1]


def test_real_conversations_train_the_assistants_turns(tmp_path: Path) -> None:
    file = Path(__file__).parents[3].parent / "shared" / "data" / "traces" / "tau_airline_gpt4o.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"the shared data is not here: {file}")
    with gzip.open(file) as lines:
        rows = [json.loads(line) for line in islice(lines, 8)]
    examples = load(tmp_path, rows, limit=100_000)
    assert len(examples) == 8
    for example, row in zip(examples, rows, strict=True):
        said = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        ids = [token for token, trained in zip(example.response_ids, example.mask, strict=True) if trained]
        assert CHAT.tokenizer.decode(ids) == "".join(f"{content}<|im_end|>" for content in said if content)
