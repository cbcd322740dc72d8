"""Where a prompt ends and an answer begins: merges across the boundary are found, handled and counted, never asserted
on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, TWO_ENDS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_example_dataset, load_judged_dataset, load_pair_dataset
from posttrain.data.readers import MERGED

# ": " is one token, and so is "ab".
MERGING = ChatFormat(byte_tokenizer(None, merges=((":", "Ġ"), ("a", "b")), eos_token="<eos>"))


def write(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data_path": str(file)}


def test_merge_across_the_boundary_is_found_and_the_answer_tokenised_on_its_own() -> None:
    crossing, clean = MERGING.split_turns([("A:", " yes<eos>"), ("A:", "yes<eos>")])
    assert (crossing.crossed, clean.crossed) == (True, False)
    assert crossing.prompt == clean.prompt
    assert MERGING.tokenizer.convert_ids_to_tokens(crossing.response) == ["Ġ", "y", "e", "s", "<eos>"]


@given(prompt=st.text("ab: ", min_size=1, max_size=8), answer=st.text("ab: ", min_size=1, max_size=8))
def test_crossing_is_exactly_when_the_whole_text_has_other_tokens_than_its_two_parts(prompt: str, answer: str) -> None:
    encode = MERGING.tokenizer.encode
    (turn,) = MERGING.split_turns([(prompt, answer)])
    assert turn.prompt == encode(prompt)
    assert turn.crossed == (encode(prompt + answer)[: len(encode(prompt))] != encode(prompt))
    assert MERGING.tokenizer.decode(turn.prompt + turn.response) == prompt + answer


def test_merges_are_counted_by_rows_and_the_rows_are_used(tmp_path: Path) -> None:
    rows = [
        {"prompt": "A:", "chosen": " yes", "rejected": " no"},
        {"prompt": "A:", "chosen": "yes", "rejected": " no"},
        {"prompt": "A:", "chosen": "yes", "rejected": "no"},
    ]
    entry = write(tmp_path, rows)
    pairs = load_pair_dataset(entry, None, MERGING, max_total_tokens=99, seed=0)
    assert (len(pairs), pairs.dropped, pairs.noted) == (3, {}, {MERGED: 2})
    assert len({pair.prompt_ids for pair in pairs}) == 1
    answers = load_judged_dataset(entry, None, MERGING, max_total_tokens=99, seed=0)
    assert (len(answers), answers.noted) == (6, {MERGED: 3})
    entry = write(tmp_path, [*rows, {"prompt": "B", "chosen": "yes", "rejected": "no"}])
    entry["split_validation_size"] = 1
    kept, held_out = load_pair_dataset(entry, None, MERGING, max_total_tokens=99, seed=0).held_out()
    assert held_out is not None
    assert (kept.noted, held_out.noted) == ({MERGED: 2}, {})


def test_merges_of_supervised_examples_are_counted_too(tmp_path: Path) -> None:
    entry = write(tmp_path, [{"input": "A:", "output": " yes"}, {"input": "A:", "output": "yes"}])
    examples = load_example_dataset(entry, None, MERGING, max_total_tokens=99, only_unmask_final=False, seed=0)
    assert (len(examples), examples.noted) == (2, {MERGED: 1})


def test_answer_of_a_tokenizer_that_puts_a_space_before_texts_gets_none() -> None:
    """As Llama 2's does: alone, "bc" would be "▁bc". After the prompt it is not the start of a text."""
    letters = ["▁", "a", "b", "c", "ab", "▁a", "▁b", "▁ab", "<eos>"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    chat = ChatFormat(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
    (turn,) = chat.split_turns([("ca", "bc<eos>")])
    assert turn.crossed
    assert chat.tokenizer.convert_ids_to_tokens(turn.response) == ["b", "c", "<eos>"]


# -- text that holds the template already ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "response", "expected"),
    [
        (CHATML, "4", "4<|im_end|>"),
        (CHATML, "4<|im_end|>", "4<|im_end|>"),
        (CHATML, "4<|im_end|>\n", "4<|im_end|>"),
        (TWO_ENDS, "4", "4<|im_end|>"),
        (TWO_ENDS, "4<eos>", "4<eos>"),
        (None, "4", "4<eos>"),
    ],
)
def test_templated_answer_is_closed_once(template: str | None, response: str, expected: str) -> None:
    eos = "<|im_end|>" if template == CHATML else "<eos>"
    chat = ChatFormat(byte_tokenizer(template, eos_token=eos))
    assert chat.templated_turn("2+2?", response) == ("2+2?", expected)


def test_templated_prompt_starts_as_the_tokenizer_starts_texts() -> None:
    tokenizer = byte_tokenizer(CHATML, bos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", tokenizer.bos_token_id)]
    )
    chat = ChatFormat(tokenizer)
    assert chat.templated_turn("2+2?", "4")[0] == "<eos>2+2?"
    assert chat.templated_turn("<eos>2+2?", "4")[0] == "<eos>2+2?"


# -- what identifies tokens and template -------------------------------------------------------------------------------


def test_fingerprints_tell_tokenizers_and_templates_apart() -> None:
    first = ChatFormat(byte_tokenizer(CHATML)).fingerprints
    assert ChatFormat(byte_tokenizer(CHATML)).fingerprints == first
    merging = ChatFormat(byte_tokenizer(CHATML, merges=(("e", "r"),))).fingerprints
    assert (merging["tokenizer"] != first["tokenizer"], merging["template"]) == (True, first["template"])
    for other in (
        ChatFormat(byte_tokenizer(TWO_ENDS)),
        ChatFormat(byte_tokenizer(CHATML), None),
        ChatFormat(byte_tokenizer(CHATML), "default", {"enable_thinking": False}),
    ):
        assert other.fingerprints["template"] != first["template"]
