"""Answers that are judged one by one: labelled rows, both answers of a pair, traces by their rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import JudgedDataset, load_judged_dataset
from posttrain.data.errors import DataError
from posttrain.data.preference_shapes import TIE
from posttrain.data.trace_datasets import BETWEEN

CHAT = ChatFormat(byte_tokenizer(CHATML))
PREFERENCES = Path(__file__).parents[3].parent / "shared" / "data" / "preferences"
ASKED = [{"role": "user", "content": "Hi?"}]


def load(folder: Path, rows: list[dict[str, Any]], limit: int = 1000, **entry: Any) -> JudgedDataset:
    file = folder / "judged.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_judged_dataset({"data_path": str(file), **entry}, None, CHAT, max_total_tokens=limit, seed=0)


def seen(answers: JudgedDataset) -> list[tuple[str, str, bool]]:
    decode = CHAT.tokenizer.decode
    return [(decode(a.prompt_ids), decode(a.response_ids), a.desirable) for a in answers]


PROMPT = CHAT.prompt(ASKED)[0]


@pytest.mark.parametrize(
    "rows",
    [
        [
            {"prompt": "Hi?", "completion": "Yes.", "label": True},
            {"prompt": "Hi?", "completion": "No.", "label": False},
        ],
        [
            {"prompt": ASKED, "completion": [{"role": "assistant", "content": "Yes."}], "label": 1},
            {"completion": [*ASKED, {"role": "assistant", "content": "No."}], "label": 0},
        ],
        [{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}],
        [{"context": ASKED, "response1": "Yes.", "response2": "No.", "overall_preference": -2}],
        [{"prompt": PROMPT, "chosen_response": "Yes.", "rejected_response": "No."}],
    ],
)
def test_shapes_give_the_same_answers(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    answers = load(tmp_path, rows)
    assert seen(answers) == [(PROMPT, "Yes.<|im_end|>", True), (PROMPT, "No.<|im_end|>", False)]
    assert sum(answer.desirable for answer in answers) == 1


def test_own_keys_are_used(tmp_path: Path) -> None:
    rows = [{"q": "Hi?", "a": "Yes.", "liked": True}]
    answers = load(tmp_path, rows, prompt_key="q", completion_key="a", label_key="liked")
    assert seen(answers) == [(PROMPT, "Yes.<|im_end|>", True)]


def test_ties_and_long_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    limit = len(CHAT.prompt(ASKED)[1]) + 4
    rows = [
        {"prompt": "Hi?", "chosen": "a", "rejected": "a"},
        {"prompt": "Hi?", "chosen": "abc", "rejected": "abcd"},
    ]
    answers = load(tmp_path, rows, limit)
    assert [text for _, text, _ in seen(answers)] == ["abc<|im_end|>"]
    assert answers.dropped == {TIE: 1, f"longer than {limit} tokens": 1}


def test_the_verdict_is_part_of_what_a_dataset_is(tmp_path: Path) -> None:
    row = {"prompt": "Hi?", "completion": "Yes."}
    marks = {load(tmp_path, [{**row, "label": label}]).fingerprint for label in (True, False)}
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"prompt": "p", "completion": "c", "label": "perhaps"},
            "row 1: 'label' must be true or false, found 'perhaps'",
        ),
        ({"prompt": "p", "completion": "c"}, "row 1: no key 'label'.*label_key"),
        ({"prompt": "p", "label": True}, "row 1: no key 'completion'.*completion_key"),
    ],
)
def test_row_without_a_verdict_is_located(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load(tmp_path, [row])


def test_traces_are_judged_by_their_reward(tmp_path: Path) -> None:
    rewards = (1.0, 0.7, 0.6, 0.5, 0.49, 0.0)
    rows = [{"input": "Hi?", "output": f"answer {r}", "final_reward": r} for r in rewards]
    answers = load(tmp_path, rows, dataset_name="Traces")
    verdicts = {text.removesuffix("<|im_end|>").split()[-1]: wanted for _, text, wanted in seen(answers)}
    assert verdicts == {"1.0": True, "0.7": True, "0.49": False, "0.0": False}
    assert answers.dropped == {BETWEEN: 2}


def test_thresholds_of_traces_come_from_the_entry(tmp_path: Path) -> None:
    rows = [{"input": "Hi?", "output": f"answer {r}", "score": r} for r in (3, 2, 1)]
    answers = load(
        tmp_path,
        rows,
        dataset_name="Traces",
        trace_columns={"reward": "score"},
        pair_rules={"preferred": 3, "rejected_below": 3},
    )
    assert sorted(wanted for _, _, wanted in seen(answers)) == [False, False, True]


def test_real_labelled_file_loads_and_every_row_is_accounted_for() -> None:
    if not PREFERENCES.is_dir():
        pytest.skip(f"the shared data is not here: {PREFERENCES}")
    entry = {"data_path": str(PREFERENCES / "kto_en_demo.jsonl.gz")}
    answers = load_judged_dataset(entry, None, CHAT, max_total_tokens=100_000, seed=0)
    assert (len(answers), sum(answer.desirable for answer in answers), answers.dropped) == (300, 150, {})


def test_traces_whose_prompts_hold_the_template_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input": PROMPT, "output": "Yes.", "final_reward": 1},
        {"input": PROMPT, "output": "No.", "final_reward": 0},
    ]
    expected = [(PROMPT, "Yes.<|im_end|>", True), (PROMPT, "No.<|im_end|>", False)]
    assert seen(load(tmp_path, rows, dataset_name="Traces", prompt_is_templated=True)) == expected
    assert seen(load(tmp_path, rows, dataset_name="Traces")) != expected
