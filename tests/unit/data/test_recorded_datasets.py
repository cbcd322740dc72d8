"""Labelled traces as groups to learn from: what a group holds in tokens, what is trained, and what is left out and
why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import TaskDataset, load_task_dataset
from posttrain.data.errors import DataError
from posttrain.data.trace_datasets import ALL_EQUAL, TOO_FEW

CHAT = ChatFormat(byte_tokenizer(CHATML))
ASKED = [{"role": "user", "content": "Hi?"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
RESULT = {"role": "tool", "content": "42"}


def load(folder: Path, rows: list[dict[str, Any]], limit: int = 1000, **entry: Any) -> TaskDataset:
    file = folder / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"dataset_name": "TraceGroups", "data_path": str(file), **entry}
    return load_task_dataset(source, None, CHAT, max_prompt_tokens=None, seed=0, max_total_tokens=limit)


def chat_rows(prompt: list[Any], *answers: list[Any]) -> list[dict[str, Any]]:
    return [
        {"messages": [*prompt, *answer], "prompt_len": len(prompt), "final_reward": float(number)}
        for number, answer in enumerate(answers)
    ]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def answers_of(tasks: TaskDataset) -> list[tuple[str, str]]:
    """Of each recorded answer all of its text, and the part that is trained."""
    decode = CHAT.tokenizer.decode
    completions = [rollout.completion for rollout in tasks[0].recorded]
    return [
        (
            decode(list(one.token_ids)),
            decode([token for token, trained in zip(one.token_ids, one.trained, strict=True) if trained]),
        )
        for one in completions
    ]


def test_text_and_conversation_and_parts_give_the_same_group(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}]
    shapes = [
        [{"input": "Hi?", "output": text, "final_reward": reward} for text, reward in (("No.", 0.0), ("Yes.", 1.0))],
        chat_rows(ASKED, [said("No.")], [said("Yes.")]),
        chat_rows(parts, [said("No.")], [{"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]),
    ]
    for rows in shapes:
        tasks = load(tmp_path, rows)
        assert CHAT.tokenizer.decode(tasks[0].prompt_ids) == CHAT.prompt(ASKED)[0]
        assert answers_of(tasks) == [("No.<|im_end|>", "No.<|im_end|>"), ("Yes.<|im_end|>", "Yes.<|im_end|>")]
        assert [rollout.score.reward for rollout in tasks[0].recorded] == [0.0, 1.0]


def test_an_answer_that_begins_with_a_bare_call_is_used_and_the_call_is_not_trained(tmp_path: Path) -> None:
    tasks = load(tmp_path, chat_rows(ASKED, [CALL, RESULT, said("No.")], [CALL, RESULT, said("42.")]))
    for (whole, trained), text in zip(answers_of(tasks), ("No.", "42."), strict=True):
        assert trained == f"{text}<|im_end|>"
        assert "42<|im_end|>" in whole  # what the tool said is read
        conversation: list[Any] = [*ASKED, {**CALL, "content": ""}, RESULT, said(text)]
        assert CHAT.prompt(ASKED)[0] + whole == CHAT.render_conversation(conversation)[0]


def test_a_call_in_the_prompt_is_read(tmp_path: Path) -> None:
    tasks = load(tmp_path, chat_rows([*ASKED, CALL, RESULT], [said("No.")], [said("42.")]))
    assert "42<|im_end|>" in tasks[0].prompt
    assert "None" not in tasks[0].prompt


def test_a_prompt_file_wraps_questions_that_stand_in_messages(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Think: {}")
    tasks = load(tmp_path, chat_rows(ASKED, [said("No.")], [said("Yes.")]), prompt_file=str(tmp_path / "prompt.txt"))
    assert tasks[0].messages == ({"role": "user", "content": "Think: Hi?"},)


def test_groups_that_teach_nothing_are_left_out_with_the_reason(tmp_path: Path) -> None:
    good = chat_rows(ASKED, [said("No.")], [said("Yes.")])
    equal = [{**row, "messages": [{"role": "user", "content": "?"}, said(str(n))], "final_reward": 1.0}
             for n, row in enumerate(good)]  # fmt: skip
    long = chat_rows([{"role": "user", "content": "!"}], [said("x" * 500)], [said("Yes.")])
    tasks = load(tmp_path, [*good, *equal, *long], limit=100)
    too_long = "an answer left out: longer than 100 tokens with its prompt"
    assert len(tasks) == 1
    assert tasks.dropped == {ALL_EQUAL: 1, f"{TOO_FEW} ({too_long})": 1}


def test_prompts_that_hold_the_template_already_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="prompt_is_templated = true"):
        load(tmp_path, chat_rows(ASKED, [said("No.")], [said("Yes.")]), prompt_is_templated=True)


def test_the_tokens_of_all_answers_share_their_objects(tmp_path: Path) -> None:
    tasks = load(tmp_path, chat_rows(ASKED, [said("No.")], [said("Yes.")]))
    tokens = [token for rollout in tasks[0].recorded for token in rollout.completion.token_ids]
    assert max(tokens) > 256  # smaller ones are shared by Python itself
    assert len({id(token) for token in tokens}) == len(set(tokens))
