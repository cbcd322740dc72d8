"""Datasets by name: every name of the guides is known or refused with a reason, and `config check` refuses what a run
does."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import datasets
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from huggingface_hub import constants

from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_example_dataset, load_pair_dataset, load_task_dataset
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import (
    PREFERENCE_DATASETS,
    RESPONSE_DATASETS,
    best_conversations,
    check_dataset_names,
    find_spec,
)
from posttrain.data.sources import Row, read_hub

CHAT = ChatFormat(byte_tokenizer(CHATML))

# The lists of the two guides for Google Kubernetes Engine.
TO_CHECK = ("OpenMathInstruct", "Deepscaler", "GSM8K", "aime24", "dapo_math", "openmathinstruct2", "squad")
TO_IMITATE = ("oai_format_dataset", "oasst", "tulu3")
TO_PREFER = ("helpsteer3", "tulu3")
OF_IMAGES = ("clevr", "geometry3k", "refcoco")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("grpo", n) for n in (*TO_CHECK, *OF_IMAGES)),
        *(("sft", n) for n in (*TO_CHECK, *TO_IMITATE, *OF_IMAGES)),
        *(("dpo", n) for n in TO_PREFER),
    ],
)
def test_every_name_of_the_guides_is_known(kind: str, name: str) -> None:
    assert find_spec(name, PREFERENCE_DATASETS if kind == "dpo" else RESPONSE_DATASETS) is not None
    check_dataset_names(load_config(kind, None, [f"data.train.dataset_name={name}"]).config)


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        *((kind, name, "posttrain grpo") for kind in ("dpo", "rm") for name in OF_IMAGES),
        ("grpo", "mmpr-tiny", "rows with `images`"),
        ("sft", "avqa", "sound or video"),
        ("grpo", "helpsteer3", "posttrain dpo"),
        ("grpo", "oasst", "posttrain sft"),
        ("dpo", "gsm8k", "posttrain grpo"),
        ("grpo", "gsm9k", "did you mean 'gsm8k'"),
        ("eval", "mmau", "sound or video"),
        ("eval", "AIME2042", "unknown benchmark"),
    ],
)
def test_check_refuses_by_name_what_a_run_would_refuse(
    kind: str, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "data.dataset_name" if kind == "eval" else "data.train.dataset_name"
    assert main(["config", "check", kind, f"{key}={name}"]) == 64
    complaint = capsys.readouterr().err
    assert name in complaint
    assert reason in complaint
    if kind != "eval":
        load = {
            "dpo": load_pair_dataset,
            "rm": load_pair_dataset,
            "sft": load_example_dataset,
            "grpo": load_task_dataset,
        }
        limits = {"max_prompt_tokens": 99} if kind == "grpo" else {"max_total_tokens": 99}
        options = {**limits, **({"only_unmask_final": False} if kind == "sft" else {})}
        with pytest.raises(DataError) as refused:
            load[kind]({"dataset_name": name}, None, CHAT, seed=0, **options)  # type: ignore[operator]
        assert str(refused.value) in complaint, "the run says the same"


def test_rows_without_an_answer_serve_a_reward_that_needs_none() -> None:
    overrides = ["data.train.dataset_name=tulu3", 'data.train.output_key=""']
    check_dataset_names(load_config("grpo", None, overrides).config)


MESSAGES = [
    {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi?"},
    {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "worse", "rank": 1},
    {"message_id": "3", "parent_id": "1", "role": "assistant", "text": "better", "rank": 0},
    {"message_id": "4", "parent_id": "3", "role": "prompter", "text": "And?"},
    {"message_id": "5", "parent_id": "4", "role": "assistant", "text": "gone", "rank": 0, "deleted": True},
    {"message_id": "6", "parent_id": None, "role": "prompter", "text": "deleted", "deleted": True},
    {"message_id": "7", "parent_id": None, "role": "prompter", "text": "unanswered"},
]
BEST = [["Hi?", "better", "And?"], ["unanswered"]]


def contents(rows: list[dict[str, object]]) -> list[list[str]]:
    found = best_conversations(Row(values, "oasst.jsonl", number) for number, values in enumerate(rows, start=1))
    return [[message["content"] for message in row.values["messages"]] for row in found]


def test_best_conversation_of_each_tree_is_read_from_messages_and_from_trees() -> None:
    assert contents(MESSAGES) == BEST
    replies = {m["message_id"]: [c for c in MESSAGES if c["parent_id"] == m["message_id"]] for m in MESSAGES}

    def tree(message: dict[str, object]) -> dict[str, object]:
        return {**message, "replies": [tree(reply) for reply in replies[message["message_id"]]]}

    assert contents([{"prompt": tree(message)} for message in MESSAGES if message["parent_id"] is None]) == BEST


def test_open_assistant_trains_on_answers_of_people(tmp_path: Path) -> None:
    file = tmp_path / "oasst.jsonl"
    file.write_text("".join(json.dumps(message) + "\n" for message in MESSAGES))
    entry = {"dataset_name": "oasst", "data_path": str(file)}
    examples = load_example_dataset(entry, None, CHAT, max_total_tokens=200, only_unmask_final=False, seed=0)
    assert len(examples) == 1
    assert examples.dropped == {"no assistant turn to learn from": 1}
    assert CHAT.tokenizer.decode(examples[0].response_ids).startswith("better")


def test_hub_that_cannot_be_reached_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse_to_wait(seconds: float) -> None:
        raise AssertionError(f"the hub's client waits {seconds} s")

    with socket.socket() as deaf:  # it holds the address and never listens
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(time, "sleep", refuse_to_wait)
        with pytest.raises(DataError, match=rf"openai/gsm8k/main\[train\].*{url} cannot be reached.*Point `data_path`"):
            list(read_hub("openai/gsm8k", ("main",), "train", str(tmp_path)))
    assert not constants.HF_HUB_OFFLINE, "the next request may succeed"
