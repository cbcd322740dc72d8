"""Equal and nearly equal responses: found within a prompt, never across prompts, and never lost without a count."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from trace_files import is_complete, trace, write_lines

from posttrain.data.traces import ReadReport, TraceFilters, iter_trace_groups
from posttrain.data.traces.filters import jaccard, minima, near_duplicates, shingles

WORDS = [f"w{number}" for number in range(500)]


def sentence(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(count)]


def slow_similarity(one: str, other: str) -> float:
    """Sets of word tuples, compared as sets."""

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))}

    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=30),
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=30),
)
def test_similarity_is_that_of_the_sets_of_shingles(one: list[str], other: list[str]) -> None:
    texts = " ".join(one), " ".join(other)
    assert abs(jaccard(shingles(texts[0]), shingles(texts[1])) - slow_similarity(*texts)) < 1e-12


def test_minima_agree_as_often_as_the_sets_are_similar() -> None:
    rng = random.Random(1)
    words = sentence(rng, 400)
    other = words[:300] + sentence(rng, 100)
    one, changed = shingles(" ".join(words)), shingles(" ".join(other))
    share = float((minima(one) == minima(changed)).mean())
    assert abs(share - jaccard(one, changed)) < 0.2  # three standard deviations of 64 trials


def test_near_duplicates_are_those_above_the_similarity() -> None:
    rng = random.Random(2)
    base = sentence(rng, 200)
    one_word = [*base[:100], "other", *base[101:]]
    texts = [
        " ".join(base),
        "  ".join(base).upper(),
        " ".join(one_word),
        " ".join(sentence(rng, 200)),
        "short",
        "Short ",
    ]
    assert near_duplicates(texts, 0.9) == [None, 0, 0, None, None, 4]
    assert near_duplicates(texts, 1.0) == [None, 0, None, None, None, 4]


def test_what_is_left_out_and_what_stays(tmp_path: Path) -> None:
    long = " ".join(sentence(random.Random(3), 60))
    rows = [
        trace("q", long, 1.0),
        trace("q", long, 1.0),
        trace("q", long, 0.0),  # the same text, another label
        trace("q", f"{long}.", 0.5),
        trace("p", long, 1.0),  # the same text, another prompt
        trace("p", "something else", 1.0),
    ]
    path = write_lines(tmp_path / "t.jsonl", rows)
    for how, counts in (
        ("keep", {}),
        ("exact", {"exact duplicate": 2}),
        ("near", {"exact duplicate": 2, "near duplicate": 1}),
    ):
        report = ReadReport()
        filters = TraceFilters(duplicates=how)  # type: ignore[arg-type]
        groups = list(iter_trace_groups(path, None, filters, report=report))
        assert {reason: tally.count for reason, tally in report.filtered.items()} == counts
        assert report.kept == 6 - sum(counts.values()) == sum(len(group.traces) for group in groups)
        assert is_complete(report)
        assert report.conflicting_duplicates == (0 if how == "keep" else 1)
        assert groups[0].traces[0].origin.endswith("row 1")
        assert len(groups[1].traces) == 2
