"""Pairs: every shape in use is recognised; ties and over-long pairs are left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import PairDataset, load_pair_dataset
from posttrain.data.errors import DataError
from posttrain.data.preference_shapes import (
    NO_ANSWER,
    NO_SHARED_PROMPT,
    PREFERENCE_NOT_FINITE,
    REWARD_NOT_FINITE,
    TIE,
)
from posttrain.data.readers import REVERSED

CHAT = ChatFormat(byte_tokenizer(CHATML))
PREFERENCES = Path(__file__).parents[3].parent / "shared" / "data" / "preferences"

ASKED = [{"role": "user", "content": "Hi?"}]
TRANSCRIPT = "\n\nHuman: a\n\nAssistant:"
GOOD, BAD = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}


def load(folder: Path, rows: list[dict[str, Any]], limit: int = 1000, **entry: Any) -> PairDataset:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_pair_dataset({"data_path": str(file), **entry}, None, CHAT, max_total_tokens=limit, seed=0)


def texts(pairs: PairDataset, index: int = 0) -> tuple[str, str, str]:
    pair = pairs[index]
    prompt, chosen, rejected = (
        CHAT.tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
    )
    return prompt, chosen, rejected


EXPECTED = (CHAT.prompt(ASKED)[0], "Yes.<|im_end|>", "No.<|im_end|>")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("PreferenceDataset", {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}),
        ("BinaryPreferenceDataset", {"prompt": ASKED, "chosen": "Yes.", "rejected": "No."}),
        ("PreferenceDataset", {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}),
        ("NeMo-Aligner", {"prompt": ASKED, "chosen_response": GOOD, "rejected_response": BAD}),
        ("NeMo-Aligner", {"prompt": ASKED, "chosen_response": "Yes.", "rejected_response": "No."}),
        (None, {"prompt": CHAT.prompt(ASKED)[0], "chosen_response": "Yes.", "rejected_response": "No.<|im_end|>"}),
        (None, {"prompt": CHAT.prompt(ASKED)[0], "chosen_response": "Yes.<|im_end|>\n", "rejected_response": "No."}),
        ("Tulu3Preference", {"prompt": "Hi?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}),
        ("UltraFeedback", {"prompt": "Hi?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "score_chosen": 8.0}),
        (None, {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}),
        (None, {"prompt": ASKED, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}),
        (None, {"chosen": "\n\nHuman: Hi?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi?\n\nAssistant: No."}),
        ("HelpSteer3", {"context": ASKED, "response1": "No.", "response2": "Yes.", "overall_preference": 2}),
        ("HelpSteer3", {"context": ASKED, "response1": "Yes.", "response2": "No.", "overall_preference": -1}),
        (
            "PreferenceDataset",
            {"context": ASKED, "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}]},
        ),
    ],
)
def test_shapes_of_preference_rows_give_the_same_pair(tmp_path: Path, name: str | None, row: dict[str, Any]) -> None:
    assert texts(load(tmp_path, [row], dataset_name=name)) == EXPECTED


def test_own_keys_are_used(tmp_path: Path) -> None:
    row = {"q": "Hi?", "good": "Yes.", "bad": "No."}
    assert texts(load(tmp_path, [row], prompt_key="q", chosen_key="good", rejected_key="bad")) == EXPECTED


def test_text_in_the_columns_of_nemo_aligner_is_what_the_model_sees(tmp_path: Path) -> None:
    row = {
        "prompt": "<extra_id_1>User\nHi?\n<extra_id_1>Assistant\n",
        "chosen_response": "Yes.",
        "rejected_response": "No.",
    }
    assert texts(load(tmp_path, [row])) == (row["prompt"], "Yes.<|im_end|>", "No.<|im_end|>")
    as_said = load(tmp_path, [row], prompt_is_templated=False)
    assert texts(as_said)[0] == CHAT.prompt([{"role": "user", "content": row["prompt"]}])[0]


def test_text_elsewhere_is_a_user_message_unless_the_entry_is_templated(tmp_path: Path) -> None:
    row = {"prompt": "Q: Hi?\nA:", "chosen": " Yes.", "rejected": " No."}
    assert texts(load(tmp_path, [row], prompt_is_templated=True)) == ("Q: Hi?\nA:", " Yes.<|im_end|>", " No.<|im_end|>")
    assert texts(load(tmp_path, [row]))[0] == CHAT.prompt([{"role": "user", "content": "Q: Hi?\nA:"}])[0]


def test_prompt_that_both_texts_start_with_is_found_as_trl_finds_it(tmp_path: Path) -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    assert texts(load(tmp_path, [row])) == ("The sky is", " blue.<|im_end|>", " green.<|im_end|>")
    from trl import extract_prompt

    expected = extract_prompt(row)
    assert expected == {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}


MORE = [GOOD, {"role": "user", "content": "Sure?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [*MORE, GOOD], "rejected": [*MORE, BAD]},
        {"prompt": [*ASKED, *MORE], "chosen": "a", "rejected": "b"},
    ],
)
def test_all_turns_before_the_answer_are_the_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    assert texts(load(tmp_path, [row]))[0] == CHAT.prompt([*ASKED, *MORE])[0]


@pytest.mark.parametrize(
    ("row", "rewards"),
    [
        ({}, (1.0, 0.0)),
        (
            {"chosen": None, "context": "Hi?", "response1": "No.", "response2": "Yes.", "overall_preference": 3},
            (3.0, 0.0),
        ),
        ({"chosen_reward": 0.9, "rejected_reward": -2}, (0.9, -2.0)),
        ({"score_chosen": 8.0, "score_rejected": 7.5}, (8.0, 7.5)),
        ({"chosen_rating": "4", "rejected_rating": None}, (4.0, 0.0)),
        ({"chosen_reward": 0.75, "score_chosen": 8.0, "score_rejected": 7.5}, (0.75, 0.0)),
    ],
)
def test_rewards_of_the_two_answers_are_read(tmp_path: Path, row: dict[str, Any], rewards: tuple[float, float]) -> None:
    pair = load(tmp_path, [{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No.", **row}])[0]
    assert (pair.chosen_reward, pair.rejected_reward) == rewards


def test_rewards_that_no_row_has_come_from_the_entry(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No.", "good": 3.0, "bad": None}]
    pair = load(tmp_path, rows, default_chosen_reward=5.0, default_rejected_reward=0.0)[0]
    assert (pair.chosen_reward, pair.rejected_reward) == (5.0, 0.0)
    named = load(tmp_path, rows, chosen_reward_key="good", rejected_reward_key="bad", default_rejected_reward=-1.0)[0]
    assert (named.chosen_reward, named.rejected_reward) == (3.0, -1.0)


def test_rewards_are_part_of_what_a_dataset_is(tmp_path: Path) -> None:
    row = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    marks = [
        load(tmp_path, [{**row, **more}]).fingerprint for more in ({}, {"chosen_reward": 1.0}, {"chosen_reward": 2.0})
    ]
    assert marks[0] == marks[1] != marks[2]


def test_rewards_the_wrong_way_round_are_noted(tmp_path: Path) -> None:
    row = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    pairs = load(tmp_path, [{**row, "chosen_reward": value, "rejected_reward": 0.5} for value in (0.25, 0.75)])
    assert (len(pairs), pairs.dropped, pairs.noted) == (2, {}, {REVERSED: 1})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Hi?", "chosen": "Yes.", "rejected": "Yes."}, TIE),
        ({"context": ASKED, "response1": "a", "response2": "b", "overall_preference": 0}, TIE),
        ({"context": ASKED, "completions": [{"rank": 0, "completion": "a"}, {"rank": 0, "completion": "b"}]}, TIE),
        ({"chosen": [*ASKED, GOOD], "rejected": [{"role": "user", "content": "Bye?"}, BAD]}, NO_SHARED_PROMPT),
        ({"chosen": f"{TRANSCRIPT} b\n\nHuman: c", "rejected": f"{TRANSCRIPT} d"}, NO_ANSWER),
        ({"prompt": "Hi?", "chosen": "a", "rejected": "b", "chosen_reward": float("nan")}, REWARD_NOT_FINITE),
        ({"prompt": "Hi?", "chosen": "a", "rejected": "b", "chosen_reward": 10**400}, REWARD_NOT_FINITE),
        (
            {"context": ASKED, "response1": "a", "response2": "b", "overall_preference": float("nan")},
            PREFERENCE_NOT_FINITE,
        ),
    ],
)
def test_rows_without_a_preference_are_dropped_and_counted(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    pairs = load(tmp_path, [row, {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}])
    assert pairs.dropped == {reason: 1}
    assert [pair.id for pair in pairs] == ["pairs:1"]


def test_both_answers_follow_the_tokens_of_the_prompt_alone(tmp_path: Path) -> None:
    pair = load(tmp_path, [{"prompt": ASKED, "chosen": "Yes.", "rejected": "No."}])[0]
    assert list(pair.prompt_ids) == CHAT.prompt(ASKED)[1]
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == CHAT.tokenizer.eos_token_id


def test_pair_is_left_out_when_its_longer_answer_does_not_fit(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi?", "chosen": "y" * 10, "rejected": "n" * length} for length in (10, 11, 5)]
    frame = len(CHAT.prompt(ASKED)[1]) + 1  # the end of the turn
    pairs = load(tmp_path, rows, limit=frame + 10)
    assert len(pairs) == 2
    assert pairs.dropped == {f"longer than {frame + 10} tokens": 1}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "Hi?", "chosen": "a"}, "row 1: no key 'rejected'.*'prompt', 'chosen'.*rejected_key"),
        ({"chosen": "a", "rejected": "b"}, "row 1: no key 'prompt'"),
        ({"prompt": "p", "completion": "c", "label": True}, "row 1: .*dpo.preference_loss=kto"),
        ({"prompt": "p", "chosen": ["a"], "rejected": "b"}, "'chosen' must be text"),
        ({"prompt": "p", "chosen": ASKED, "rejected": "b"}, "'chosen' must end with an assistant's turn"),
        ({"prompt": [{"content": "p"}, {}], "chosen": "a", "rejected": "b"}, "message 1 of 'prompt' needs the texts"),
        ({"context": "p", "completions": [{"rank": 0}]}, "'completions' needs two records"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "chosen_reward": "good"}, "'chosen_reward' must be a number"),
    ],
)
def test_row_that_is_no_preference_is_located(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load(tmp_path, [row])


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("hh_harmless_test.jsonl.gz", 500),
        ("ultrafeedback_test.jsonl.gz", 199),
        ("pandalm_human.jsonl.gz", 836),
        ("llmbar.jsonl", 419),
        ("dpo_en_demo.jsonl.gz", 300),
    ],
)
def test_real_preference_files_load_and_every_row_is_accounted_for(file: str, rows: int) -> None:
    if not PREFERENCES.is_dir():
        pytest.skip(f"the shared data is not here: {PREFERENCES}")
    entry = {"dataset_name": "PreferenceDataset", "data_path": str(PREFERENCES / file)}
    pairs = load_pair_dataset(entry, None, CHAT, max_total_tokens=4000, seed=0)
    too_long = pairs.dropped.get("longer than 4000 tokens", 0)
    assert len(pairs) + too_long == rows
    assert len(pairs) > rows / 2
    assert all(len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) <= 4000 for p in pairs)


@pytest.mark.parametrize("rank", [None, "first", float("nan")])
def test_a_rank_that_is_no_number_is_named(tmp_path: Path, rank: Any) -> None:
    completions = [{"rank": rank, "completion": [GOOD]}, {"rank": 1, "completion": [BAD]}]
    with pytest.raises(DataError, match=r"row 1: 'rank' must be a number"):
        load(tmp_path, [{"context": ASKED, "completions": completions}])


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not valid Unicode"):
        load(tmp_path, [{"prompt": "Hi \ud800?", "chosen": "Yes.", "rejected": "No."}])


def test_no_prompt_is_both_trained_on_and_validated_with(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{number}", "chosen": f"good {answer}", "rejected": f"bad {answer}"}
        for answer in range(3)
        for number in range(20)
    ]
    training, validation = load(tmp_path, rows, split_validation_size=10).held_out()
    assert validation is not None
    assert len(validation) == 12  # four prompts of three pairs
    assert len(training) == 48
    assert not {pair.prompt_ids for pair in training} & {pair.prompt_ids for pair in validation}
    with pytest.raises(DataError, match="3 different rows of 1 prompts"):
        load(tmp_path, [row for row in rows if row["prompt"] == "q0"], split_validation_size=1).held_out()
