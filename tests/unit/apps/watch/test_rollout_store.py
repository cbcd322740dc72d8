"""Rollouts as the dashboard reads them: filters, search in slices, bounded memory, damaged files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_groups

from posttrain.apps.watch.places import LocalPlace
from posttrain.apps.watch.rollout_filters import Filters, Range, asked
from posttrain.apps.watch.rollout_store import RolloutStore, StepCache


def answer(text: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {
        "text": text,
        "reward": reward,
        "parts": {},
        "advantage": 0.0,
        "error": None,
        "finish_reason": "stop",
        "num_tokens": len(text),
        **more,
    }


def group(draw: int, *answers: dict[str, Any], prompt: str = "a prompt") -> dict[str, Any]:
    return {"draw": draw, "id": f"set:{draw}", "prompt": prompt, "reference": None, "completions": list(answers)}


GROUPS = [
    group(0, answer("seven apples", 1.0), answer("eight", 0.0, finish_reason="length")),
    group(1, answer("nine", 0.5, parts={"format": 0.1}), answer("ten", 0.5, parts={"format": 0.9})),
    group(2, answer("", None, error="timeout after 5 s"), answer('École "quoted"\n', 0.2), prompt="Straße"),
]


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    write_groups(tmp_path, 1, GROUPS)
    return RolloutStore(LocalPlace(tmp_path), StepCache())


def shown(store: RolloutStore, **filters: Any) -> list[tuple[int, list[int]]]:
    """Group and matching answers, by the listing; the search must find the same."""
    found = [(row["index"], row["matching"]) for row in store.listing("train", 1, Filters(**filters)).groups]
    hits = store.search("train", Filters(**filters), None).hits
    assert [(hit["index"], hit["matching"]) for hit in hits] == found
    return found


def test_without_filters_every_group_is_shown(store: RolloutStore) -> None:
    assert shown(store) == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])]


def test_filters_choose_groups_by_their_answers(store: RolloutStore) -> None:
    assert shown(store, reward=Range(0.9, None)) == [(0, [0])]
    assert shown(store, reward=Range(None, 0.3)) == [(0, [1]), (2, [1])]
    assert shown(store, spread=Range(0.5, None)) == [(0, [0, 1])]
    assert shown(store, length=Range(12, None)) == [(0, [0]), (2, [1])]
    assert shown(store, finish="length") == [(0, [1])]
    assert shown(store, error=True) == [(2, [0])]
    assert shown(store, part="format", part_value=Range(0.5, None)) == [(1, [1])]
    assert shown(store, task="set:1") == [(1, [0, 1])]
    assert shown(store, text="e", reward=Range(0.4, None)) == [(0, [0]), (1, [0, 1])]


def test_search_ignores_case_also_beyond_ascii_and_finds_what_json_escapes(store: RolloutStore) -> None:
    assert shown(store, text="SEVEN") == [(0, [0])]
    assert shown(store, text="éCOLE") == [(2, [1])]
    assert shown(store, text='"QUOTED"\n') == [(2, [1])]
    assert shown(store, text="straße") == [(2, [0, 1])], "found in the prompt: every answer belongs to it"
    assert shown(store, text="completions") == [], "a name in the file is no text"


def test_turns_are_searched(tmp_path: Path) -> None:
    turns = [{"role": "tool", "text": "the result", "num_tokens": 2}]
    write_groups(tmp_path, 1, [group(0, answer("last words", 1.0, turns=turns))])
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    assert len(store.search("train", Filters(text="result"), None).hits) == 1


def test_search_goes_on_where_a_slice_ended(tmp_path: Path) -> None:
    for step in range(1, 31):
        write_groups(
            tmp_path, step, [group(index, answer("needle" if index == 1 else "hay", 1.0)) for index in range(3)]
        )
    ticks: Iterator[float] = iter(range(10_000))
    store = RolloutStore(LocalPlace(tmp_path), StepCache(), clock=lambda: float(next(ticks)))
    steps, cursor, num_slices = [], None, 0
    while True:
        found = store.search("train", Filters(text="needle"), cursor, slice_s=2.5)
        steps += [hit["step"] for hit in found.hits]
        num_slices, cursor = num_slices + 1, found.cursor
        if cursor is None:
            break
        assert found.num_steps_left == cursor.step
    assert steps == list(range(30, 0, -1))
    assert num_slices == 10


def test_search_with_many_hits_goes_on_within_a_step(tmp_path: Path) -> None:
    write_groups(tmp_path, 1, [group(index, answer("x", 1.0)) for index in range(100)])
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    found, cursor = [], None
    for _ in range(3):
        part = store.search("train", Filters(text="x"), cursor)
        found += [hit["index"] for hit in part.hits]
        cursor = part.cursor
    assert found == list(range(100))
    assert cursor is None


def test_memory_of_unpacked_steps_is_bounded(tmp_path: Path) -> None:
    for step in range(1, 41):
        write_groups(tmp_path, step, [group(0, answer("word " * 2000, 1.0))])
    cache = StepCache(max_bytes=50_000)
    store = RolloutStore(LocalPlace(tmp_path), cache)
    for step in range(1, 41):
        assert store.group("train", step, 0) is not None
        assert cache.num_bytes <= 50_000
    store.search("train", Filters(text="absent"), None)
    assert cache.num_bytes <= 50_000


def test_step_that_ran_again_is_read_again(tmp_path: Path, store: RolloutStore) -> None:
    assert store.listing("train", 1, Filters()).num_groups == 3
    write_groups(tmp_path, 1, GROUPS[:1])
    assert store.listing("train", 1, Filters()).num_groups == 1


def test_damaged_files_give_what_can_be_read(tmp_path: Path) -> None:
    write_groups(tmp_path, 1, GROUPS)
    file = tmp_path / "rollouts" / "step_1.jsonl.gz"
    packed = file.read_bytes()
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    for content in (packed[: len(packed) // 2], b"", b"no gzip", gzip.compress(b"[1]\n{bad\n")):
        file.write_bytes(content)
        assert store.listing("train", 1, Filters()).num_matching <= len(GROUPS)
    assert store.group("train", 99, 0) is None


def test_file_that_unpacks_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.rollout_store.MAX_STEP_BYTES", 10_000)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl.gz").write_bytes(gzip.compress(b"\0" * 10_000_000))
    lines = RolloutStore(LocalPlace(tmp_path), StepCache()).lines("train", 1)
    assert lines is not None
    assert lines.num_bytes <= 10_000 + 150 * len(lines)
    assert lines.is_cut


def test_steps_are_those_of_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    write_groups(tmp_path, 10, GROUPS)
    write_groups(tmp_path, 2, GROUPS)
    write_groups(tmp_path, 4, GROUPS, kind="validation_step")
    (tmp_path / "rollouts" / "step_2.tokens.npz").write_bytes(b"")
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    assert (store.steps("train"), store.steps("validation")) == ([2, 10], [4])
    assert store.steps("train", with_tokens=True) == [2]


def test_preview_of_a_prompt_is_the_question() -> None:
    chat = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked(chat) == "What is 2 + 3?"
    assert asked("<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n") == "Why?"
    assert asked("no template") == "no template"
