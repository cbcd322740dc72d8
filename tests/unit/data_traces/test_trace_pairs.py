"""Pairs from rewards: each strategy against a slow and obvious one, and what is said of prompts that yield none."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import chat_trace, trace, write_lines

from posttrain.data.errors import DataError
from posttrain.data.traces import PairReport, PairRules, ReadReport, iter_pair_rows
from posttrain.data.traces.pair_files import write_pairs
from posttrain.data.traces.pairs import choose_pairs, clear_best_worst
from posttrain.data.traces.reading import Reading

rewards_of_a_prompt = st.lists(st.sampled_from([0.0, 0.3, 0.45, 0.5, 0.6, 0.7, 0.9, 1.0]), min_size=1, max_size=7)
strategies = st.sampled_from(["best_worst", "all", "one_per_preferred"])


def apart(high: float, low: float, margin: float) -> bool:
    """As people reckon, in decimals: 0.7 and 0.4 are 0.3 apart, whatever binary numbers make of it."""
    return Decimal(str(high)) - Decimal(str(low)) >= Decimal(str(margin))


@given(rewards_of_a_prompt, strategies, st.sampled_from([0.0, 0.4, 0.6]), st.sampled_from([None, 1, 3]))
def test_thresholds_margin_and_cap_hold(rewards: list[float], strategy: Any, margin: float, cap: int | None) -> None:
    rules = PairRules(strategy=strategy, min_margin=margin, max_pairs_per_prompt=cap)
    choice = choose_pairs(rewards, range(len(rewards)), rules)
    assert bool(choice.pairs) != bool(choice.why_none)
    for chosen, rejected in choice.pairs:
        assert rewards[chosen] >= 0.7
        assert rewards[rejected] < 0.5
        assert apart(rewards[chosen], rewards[rejected], margin)
    assert len(choice.pairs) <= (cap or 100)
    allowed = {
        (i, j)
        for i, high in enumerate(rewards)
        for j, low in enumerate(rewards)
        if high >= 0.7 and low < 0.5 and apart(high, low, margin)
    }
    if strategy == "all":
        assert len(choice.pairs) + choice.over_the_cap == len(allowed)
        assert set(choice.pairs) <= allowed
    if strategy == "best_worst":
        assert len(choice.pairs) == bool(allowed)
    if strategy == "one_per_preferred" and margin == 0:
        assert len(choice.pairs) + choice.over_the_cap == len({i for i, _ in allowed})


@given(rewards_of_a_prompt, st.sampled_from([0.1, 0.4]))
def test_by_margin_takes_any_two_that_are_far_enough_apart(rewards: list[float], margin: float) -> None:
    choice = choose_pairs(rewards, range(len(rewards)), PairRules(strategy="by_margin", min_margin=margin))
    everything = [(i, j) for i, a in enumerate(rewards) for j, b in enumerate(rewards) if a > b and apart(a, b, margin)]
    assert set(choice.pairs) == set(everything)
    margins = [rewards[i] - rewards[j] for i, j in choice.pairs]
    assert margins == sorted(margins, reverse=True)


def test_the_best_meets_the_worst_and_of_equals_the_earlier_one() -> None:
    assert choose_pairs([0.8, 1.0, 0.2, 0.0, 1.0, 0.0], range(6), PairRules()).pairs == [(1, 3)]


def test_one_per_preferred_spreads_over_the_rejected() -> None:
    rules = PairRules(strategy="one_per_preferred")
    assert set(choose_pairs([0.9, 0.8, 1.0, 0.1, 0.0], range(5), rules).pairs) == {(2, 4), (0, 3), (1, 4)}


def test_an_answer_is_never_preferred_to_itself() -> None:
    same = [7, 7, 8]
    assert choose_pairs([1.0, 0.0], same, PairRules()).why_none == "the two answers are the same text"
    assert choose_pairs([1.0, 0.0, 0.3], same, PairRules()).pairs == [(0, 2)]
    rules = PairRules(strategy="one_per_preferred")
    assert choose_pairs([1.0, 0.0, 0.3], same, rules).pairs == [(0, 2)]


def test_a_margin_is_the_decimal_that_people_read() -> None:
    assert 0.7 - 0.4 < 0.3 < 0.8 - 0.4
    rules = PairRules(min_margin=0.3)
    assert choose_pairs([0.7, 0.4], range(2), rules).pairs == [(0, 1)]
    best, worst, clear = clear_best_worst(np.array([0.7, 0.4]), np.arange(2), np.array([0, 2]), rules)
    assert (best, worst, clear) == ([0], [1], [True])


# In a process of its own: tracemalloc counts what every thread of a process allocates.
MEMORY_OF_A_CAPPED_CHOICE = """
import sys, tracemalloc
from posttrain.data.traces.pairs import choose_pairs
from posttrain.data.traces.values import PairRules
rewards = [0.8 if number % 2 else 0.2 for number in range(600)]  # 90,000 pairs
rules = PairRules(strategy=sys.argv[1], min_margin=0.5, max_pairs_per_prompt=2)
tracemalloc.start()
choice = choose_pairs(rewards, range(600), rules)
print(choice.pairs, choice.over_the_cap, tracemalloc.get_traced_memory()[1] < 200_000)
"""


@pytest.mark.parametrize("strategy", ["all", "by_margin"])
def test_a_cap_bounds_the_memory_of_a_prompt_with_many_answers(strategy: str) -> None:
    command = [sys.executable, "-c", MEMORY_OF_A_CAPPED_CHOICE, strategy]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[(1, 0), (1, 2)] 89998 True"


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([1.0], "only one answer"),
        ([1.0, 1.0], "all rewards are equal"),
        ([0.1, 0.2], "no answer with a reward of 0.7 or more"),
        ([0.8, 0.9], "no answer with a reward below 0.5"),
        ([0.5, 0.6], "all rewards lie between 0.5 and 0.7"),
        ([0.7, 0.45], "no two rewards differ by min_margin"),
    ],
)
def test_why_a_prompt_yields_none(rewards: list[float], why: str) -> None:
    assert choose_pairs(rewards, range(len(rewards)), PairRules(min_margin=0.3)).why_none == why


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 0.4, 0.6, 0.8, 1.0]), st.integers(0, 3)), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_short_cut_equals_the_rules(prompts: list[list[tuple[float, int]]]) -> None:
    rows = [row for prompt in prompts for row in prompt]
    starts = np.cumsum([0, *map(len, prompts)])
    rules = PairRules(min_margin=0.5)
    columns = np.array([reward for reward, _ in rows]), np.array([identity for _, identity in rows])
    best, worst, clear = clear_best_worst(*columns, starts, rules)
    for number, prompt in enumerate(prompts):
        slow = choose_pairs([reward for reward, _ in prompt], [identity for _, identity in prompt], rules).pairs
        if clear[number]:
            assert slow == [(best[number] - starts[number], worst[number] - starts[number])]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preferred": 0.3}, "preferred and rejected at once"),
        ({"strategy": "best"}, "strategy is 'best'.*'best_worst'"),
        ({"strategy": "by_margin"}, "above 0"),
        ({"min_margin": -1.0}, "min_margin is -1.*0"),
        ({"max_pairs_per_prompt": 0}, "max_pairs_per_prompt is 0.*1"),
    ],
)
def test_rules_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PairRules(**wrong)


# -- rows and files ----------------------------------------------------------------------------------------------------

ROWS = [
    trace("q", "bad", 0.1),
    trace("only", "one", 1.0),
    trace("q", "good", 0.9),
    trace("p", "yes", 1),
    trace("p", "no", 0),
    trace("p", "maybe", 0.6),
]


def test_rows_of_pairs_and_the_report(tmp_path: Path) -> None:
    counts = PairReport()
    rows = list(iter_pair_rows(write_lines(tmp_path / "t.jsonl", ROWS), pair_report=counts))
    assert rows == [
        {
            "prompt": "q",
            "chosen_response": "good",
            "rejected_response": "bad",
            "chosen_reward": 0.9,
            "rejected_reward": 0.1,
        },
        {
            "prompt": "p",
            "chosen_response": "yes",
            "rejected_response": "no",
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
        },
    ]
    assert counts.as_dict() == {
        "prompts": 3,
        "prompts_with_pairs": 2,
        "pairs": 2,
        "mean_margin": pytest.approx(0.9),
        "prompts_without_pairs": {"only one answer": 1},
        "over_the_cap": 0,
        "not_writable": {},
    }


def written(
    tmp_path: Path, rows: list[dict[str, Any]], form: Any, **options: Any
) -> tuple[list[dict[str, Any]], PairReport]:
    counts = PairReport()
    path = write_lines(tmp_path / "t.jsonl", rows)
    out = tmp_path / "out.jsonl"
    lines = write_pairs(Reading(path), out, PairRules(), form, ReadReport(), counts, **options)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == lines
    return found, counts


def test_nemo_aligner_file(tmp_path: Path) -> None:
    found, _ = written(tmp_path, ROWS, "aligner", templated=True)
    assert found == list(iter_pair_rows(str(tmp_path / "t.jsonl")))
    # NeMo-Aligner takes a text for a prompt that holds the template already: a question is written as a message.
    [first, _], _ = written(tmp_path, ROWS, "aligner")
    assert first["prompt"] == [{"role": "user", "content": "q"}]
    assert first["chosen_response"] == {"role": "assistant", "content": "good"}
    assert (first["chosen_reward"], first["rejected_reward"]) == (0.9, 0.1)


def test_trl_file(tmp_path: Path) -> None:
    data_utils = pytest.importorskip("trl.data_utils", reason="the bench extra is not installed")
    [text, _], _ = written(tmp_path, ROWS, "trl")
    assert text == {"prompt": "q", "chosen": "good", "rejected": "bad", "score_chosen": 0.9, "score_rejected": 0.1}
    assert not data_utils.is_conversational(text)
    [chat], _ = written(tmp_path, [chat_trace("q", "good", 1), chat_trace("q", "bad", 0)], "trl")
    assert chat["chosen"] == [{"role": "assistant", "content": "good"}]
    assert data_utils.is_conversational(chat)


def test_answers_of_several_messages_fit_trl_but_not_nemo_aligner(tmp_path: Path) -> None:
    rows = [chat_trace("q", "good", 1), chat_trace("q", "bad", 0)]
    rows[0]["messages"] += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "so"}]
    [found], _ = written(tmp_path, rows, "trl")
    assert [turn["content"] for turn in found["chosen"]] == ["good", "go on", "so"]
    with pytest.raises(DataError, match="an answer of several messages"):
        written(tmp_path, rows, "aligner")
    _, counts = written(tmp_path, [*rows, *ROWS[:0], chat_trace("p", "x", 1), chat_trace("p", "y", 0)], "aligner")
    assert sum(counts.not_writable.values()) == 1


def test_without_a_pair_there_is_no_file_and_an_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old\n")
    with pytest.raises(DataError, match=r"among 1 prompts \(1 prompts: only one answer; 1 rows: no reward\)"):
        written(tmp_path, [ROWS[1], trace("q", "a", None)], "trl")
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "t.jsonl"]


def test_gzip_output_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    import gzip

    path = write_lines(tmp_path / "t.jsonl", ROWS)
    outs = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for out in outs:
        write_pairs(Reading(path), out, PairRules(), "trl", ReadReport(), PairReport())
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert len(gzip.decompress(outs[0].read_bytes()).splitlines()) == 2


@pytest.mark.parametrize(
    ("out", "message"),
    [("x.json", "must end in .jsonl"), ("no/x.jsonl", "does not exist"), ("t.jsonl", "is one of the files")],
)
def test_bad_places_to_write_to(tmp_path: Path, out: str, message: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", ROWS)
    with pytest.raises(DataError, match=message):
        write_pairs(Reading(path), tmp_path / out, PairRules(), "trl", ReadReport(), PairReport())
