"""Reward functions written for TRL: lists in, a list out, columns under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.python_function import FunctionLoadError, load_scorer

ITEM = ScoringItem(
    prompt="<user>2 + 2<end>",
    response="4",
    reference=None,
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}],
    metadata={"answer": "4", "level": 3},
    token_ids=(7, 8),
)


def scorer(tmp_path: Path, source: str, *, as_messages: bool = False) -> Any:
    (tmp_path / "rewards.py").write_text(source)
    return load_scorer("rewards.py:reward", tmp_path, as_messages=as_messages)


def test_texts_columns_and_tokens_come_as_lists_of_one(tmp_path: Path) -> None:
    source = (
        "def reward(prompts, completions, completion_ids, answer, **columns):\n"
        "    assert (prompts, completions, completion_ids) == (['2 + 2'], ['4'], [[7, 8]])\n"
        "    assert columns == {'level': [3]}\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert scorer(tmp_path, source)(ITEM) == 1.0


def test_messages_come_as_lists_of_messages_when_the_prompts_are_messages(tmp_path: Path) -> None:
    source = "def reward(completions, prompts): return [len(prompts[0]) + len(completions[0][0]['content'])]\n"
    assert scorer(tmp_path, source, as_messages=True)(ITEM) == 3


def test_it_may_be_async(tmp_path: Path) -> None:
    assert scorer(tmp_path, "async def reward(completions, **columns): return [0.5]\n")(ITEM) == 0.5


@pytest.mark.parametrize("returned", ["0.5", "[]", "[1.0, 2.0]", "'a'"])
def test_a_result_that_is_no_list_of_one_leaves_the_answer_unscored(tmp_path: Path, returned: str) -> None:
    with pytest.raises(Unscored, match="one number per completion"):
        scorer(tmp_path, f"def reward(completions): return {returned}\n")(ITEM)


def test_a_missing_column_and_arguments_of_trls_trainer_are_named(tmp_path: Path) -> None:
    with pytest.raises(Unscored, match=r"column 'solution'; the row has the columns answer, level"):
        scorer(tmp_path, "def reward(completions, solution): return [1.0]\n")(ITEM)
    with pytest.raises(FunctionLoadError, match="trainer_state, which only TRL's trainer has"):
        scorer(tmp_path, "def reward(completions, trainer_state): return [1.0]\n")


def test_a_pickle_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FunctionLoadError, match=r"there is no file .*gone\.pkl"):
        load_scorer("gone.pkl:mine", tmp_path)
    (tmp_path / "bad.pkl").write_bytes(b"not a pickle")
    with pytest.raises(FunctionLoadError, match=r"bad\.pkl cannot be loaded"):
        load_scorer("bad.pkl:mine", tmp_path)
