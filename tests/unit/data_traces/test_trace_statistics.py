"""Statistics against counting by hand; no text in them; the picture and the advice that are made of them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from trace_files import random_rows, trace, write_lines, write_parquet

from posttrain.data.traces import PairRules, TraceColumns, TraceFilters, iter_pair_rows
from posttrain.data.traces.advice import advise
from posttrain.data.traces.reading import Reading
from posttrain.data.traces.statistics import TraceStatistics, collect_statistics, histogram_edges
from posttrain.reporting.charts import reward_histogram


def collect(path: str, rules: PairRules | None = None, tokenizer: Any = None, **options: Any) -> TraceStatistics:
    return collect_statistics(Reading(path, **options), rules or PairRules(), tokenizer)


@pytest.mark.parametrize("memory_bytes", [500, 1 << 30])
def test_numbers_are_those_that_counting_gives(tmp_path: Path, memory_bytes: int) -> None:
    rows = random_rows(900, 200)
    for number, row in enumerate(rows):
        row["model"] = f"m{number % 3}"
    path = write_parquet(tmp_path / "t.parquet", rows)
    found = collect(path, memory_bytes=memory_bytes)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["input"]].append(row)
    rewards = [row["final_reward"] for row in rows]
    assert found.traces == found.read.rows == 900
    assert found.groups == len(groups)
    assert found.single == sum(len(group) == 1 for group in groups.values())
    assert found.with_signal == sum(len({row["final_reward"] for row in group}) > 1 for group in groups.values())
    assert found.graded == sum(len({row["final_reward"] for row in group}) > 2 for group in groups.values())
    assert found.diverse == sum(len({row["output"] for row in group}) > 2 for group in groups.values())
    assert found.exact_duplicates == sum(
        len(group) - len({row["output"] for row in group}) for group in groups.values()
    )
    assert sum(found.group_sizes.values()) == found.groups
    assert found.reward_mean == pytest.approx(statistics.fmean(rewards))
    assert found.reward_std == pytest.approx(statistics.pstdev(rewards))
    assert (found.preferred, found.rejected) == (sum(r >= 0.7 for r in rewards), sum(r < 0.5 for r in rewards))
    assert sum(found.bin_counts) == 900
    assert found.bin_counts[0] == rewards.count(0.0)
    assert found.models["m1"] == (300, pytest.approx(statistics.fmean(rewards[1::3])))
    assert found.pairs.pairs == len(list(iter_pair_rows(path)))
    assert found.lengths is not None
    assert found.lengths.response["max"] == max(len(row["output"]) for row in rows)


def test_a_sample_gives_nearly_the_lengths_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.traces.statistics.SAMPLE_SIZE", 400)
    monkeypatch.setattr("posttrain.data.traces.files.BLOCK_BYTES", 20_000)
    rows = [trace("q", "x" * (number % 1000), number % 2) for number in range(4000)]
    lengths = collect(write_lines(tmp_path / "t.jsonl", rows)).lengths
    assert lengths is not None
    assert lengths.sampled == 400
    assert abs(lengths.response["p50"] - 500) < 75
    assert abs(lengths.response["p90"] - 900) < 45


def test_lengths_in_tokens(tmp_path: Path) -> None:
    class Words:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1] * len(text.split()) for text in texts]}

    lengths = collect(write_lines(tmp_path / "t.jsonl", [trace("a b c", "d e", 1)]), tokenizer=Words()).lengths
    assert lengths is not None
    assert (lengths.unit, lengths.prompt["p50"], lengths.response["p50"]) == ("tokens", 3, 2)


def test_no_text_of_a_trace_is_in_the_statistics(tmp_path: Path) -> None:
    rows = [
        trace("SECRET question", f"SECRET answer {n}", n / 2, trace_id="SECRET id", group_id="SECRET g")
        for n in range(3)
    ]
    rows.append(trace("SECRET question", "SECRET answer", "SECRET reward"))
    path = write_lines(tmp_path / "t.jsonl", rows)
    found = collect(path, filters=TraceFilters(duplicates="near"))
    advice = advise(found, path)
    assert "SECRET" not in json.dumps([found.as_dict(), advice.as_dict()])
    assert "SECRET" not in histogram_of(found, "rewards")


def test_edges_of_the_histogram_are_round_and_hold_every_reward() -> None:
    assert histogram_edges(0.0, 1.0).tolist() == pytest.approx([n / 20 for n in range(21)])
    for low, high in [(1.0, 10.0), (-3.2, 0.1), (5.0, 5.0), (-1e6, 1e6), (0.2, 1.001)]:
        edges = histogram_edges(low, high)
        assert edges[0] <= low
        assert high < edges[-1]
        assert 2 <= len(edges) <= 23


def histogram_of(found: TraceStatistics, title: str) -> str:
    bars = found.bin_edges, found.bin_counts, found.bin_kinds
    return reward_histogram(title, found.headline, *bars, unit="traces")


def test_the_picture_has_a_bar_for_each_bin_and_escapes_its_title(tmp_path: Path) -> None:
    found = collect(write_lines(tmp_path / "t.jsonl", random_rows(50, 5)))
    root = ElementTree.fromstring(histogram_of(found, "a <b> & c"))
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") in ("low", "mid", "high")]
    assert len(bars) == len(found.bin_counts)
    tallest = max(range(len(bars)), key=lambda index: float(bars[index].get("height", 0)))
    assert found.bin_counts[tallest] == max(found.bin_counts)


# -- advice ------------------------------------------------------------------------------------------------------------


def prompts(count: int, *answers: tuple[str, float]) -> list[dict[str, Any]]:
    return [trace(f"q{n}", text, reward) for n in range(count) for text, reward in answers]


CLEAR_PAIRS = prompts(200, ("good", 1.0), ("bad", 0.0))
RANKED = prompts(200, ("a", 1.0), ("b", 0.55), ("c", 0.3), ("d", 0.0))
TWO_LEVELS = prompts(200, ("a", 1.0), ("b", 1.0), ("c", 0.0), ("d", 0.0))
GRADED = prompts(200, ("a", 1.0), ("b", 0.9), ("c", 0.3), ("d", 0.0))
CONTRADICTED = prompts(200, ("a", 1.0), ("a", 0.0), ("b", 0.0))
NO_SIGNAL = prompts(200, ("a", 1.0), ("b", 1.0))
HARDLY_ANY_SIGNAL = [*prompts(200, ("a", 1.0), ("b", 1.0), ("c", 1.0)), *prompts(5, ("d", 0.0))]


@pytest.mark.parametrize(
    ("rows", "quick", "method"),
    [
        (CLEAR_PAIRS, False, "DPO"),
        (RANKED, False, "GRPO"),
        (RANKED, True, "DPO"),
        (TWO_LEVELS, False, "DPO"),
        (GRADED, False, "GRPO"),
        (CONTRADICTED, True, "GRPO"),
        (NO_SIGNAL, False, "GRPO with fresh answers"),
        (HARDLY_ANY_SIGNAL, False, "GRPO with fresh answers"),
    ],
)
def test_advice_follows_the_criteria(tmp_path: Path, rows: list[dict[str, Any]], quick: bool, method: str) -> None:
    found = collect(write_lines(tmp_path / "t.jsonl", rows), columns=TraceColumns())
    advice = advise(found, "t.jsonl", quick=quick, options=" --preferred 0.8")
    assert advice.method == method
    assert all(any(digit.isdigit() for digit in one.numbers) for one in advice.criteria[:3])
    if method == "DPO":
        assert advice.commands[0] == "posttrain data pairs t.jsonl pairs.jsonl --preferred 0.8"


def test_advice_warns_of_few_prompts(tmp_path: Path) -> None:
    found = collect(write_lines(tmp_path / "t.jsonl", CLEAR_PAIRS[:20]))
    assert advise(found, "t").cautions == ["only 10 of 10 prompts can be learnt from"]


@pytest.mark.parametrize(
    "rewards", [[1.7, 2.0], [1.9, 3.0], [5.0, 5.0], [-1e-15, 0.0], [-1e30, 1e30], [2.675, 2.7], [-0.7, 1.7]]
)
def test_the_histogram_holds_every_reward(tmp_path: Path, rewards: list[float]) -> None:
    # 1.7 is less than 17 * 0.1 in binary, so an edge at "1.7" would leave it out.
    path = write_lines(tmp_path / "t.jsonl", [trace("q", f"a{n}", reward) for n, reward in enumerate(rewards)])
    with np.errstate(over="ignore", invalid="ignore"):
        found = collect(path)
    assert sum(found.bin_counts) == len(rewards)
    assert len(found.bin_edges) == len(found.bin_counts) + 1 == len(set(found.bin_edges))
    ElementTree.fromstring(histogram_of(found, "rewards"))


def test_rows_that_are_pairs_already_go_to_dpo_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i}", "chosen": "good", "rejected": "bad", "score_chosen": 8.0, "score_rejected": 3.0}
        for i in range(150)
    ]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    advice = advise(collect(path), path)
    assert advice.method == "DPO"
    assert advice.reason == "the rows are preference pairs already"
    assert advice.cautions == []  # thresholds on rewards decide nothing here
    assert advice.commands == [f"posttrain dpo data.train.dataset_name=PreferenceDataset data.train.data_path={path}"]
