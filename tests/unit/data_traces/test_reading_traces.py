"""Traces come out of every kind of file alike; what cannot be used is named and counted, and nothing is lost."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from trace_files import chat_trace, is_complete, random_rows, trace, write_lines, write_parquet

from posttrain.data.errors import DataError
from posttrain.data.traces import ReadReport, TraceColumns, TraceFilters, files, iter_trace_groups


def groups_of(path: str, **options: Any) -> dict[str, list[tuple[str, float]]]:
    found = iter_trace_groups(path, **options)
    return {str(group.prompt): [(str(one.response), one.reward) for one in group.traces] for group in found}


def slow_groups(rows: list[dict[str, Any]]) -> dict[str, list[tuple[str, float]]]:
    """The obvious way: a dict."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append((row["output"], row["final_reward"]))
    return groups


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.parquet"])
def test_every_kind_of_file_gives_the_same_groups(tmp_path: Path, name: str) -> None:
    rows = random_rows(500, 60)
    path = (write_parquet if name.endswith("parquet") else write_lines)(tmp_path / name, rows)
    found = groups_of(path)
    assert found == slow_groups(rows)
    assert list(found) == list(slow_groups(rows))  # prompts by first appearance


def test_conversations_give_the_same_from_lines_and_from_parquet(tmp_path: Path) -> None:
    rows = [chat_trace(f"q{n % 3}", f"a{n}", n / 10, group_id=f"g{n % 3}", model="m") for n in range(9)]
    # In Parquet every message has the keys of all; the absent ones are null.
    rows[4]["messages"][1]["name"] = "bot"
    lines, table = write_lines(tmp_path / "t.jsonl", rows), write_parquet(tmp_path / "t.parquet", rows)
    one, other = list(iter_trace_groups(lines)), list(iter_trace_groups(table))
    strip = [[(a.prompt, a.response, a.reward, a.group_id, a.model) for a in group.traces] for group in one]
    assert strip == [[(a.prompt, a.response, a.reward, a.group_id, a.model) for a in group.traces] for group in other]
    assert one[0].prompt == [{"role": "user", "content": "q0"}]
    assert one[0].traces[0].response == "a0"
    assert one[1].traces[1].response == [{"role": "assistant", "content": "a4", "name": "bot"}]
    assert one[1].traces[1].response_text == "a4"


def test_a_trace_of_several_turns_keeps_them(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "4"},
    ]
    after = {"role": "user", "content": "thanks"}  # is not the model's
    path = write_lines(tmp_path / "t.jsonl", [{"messages": [*turns, after], "prompt_len": 2, "final_reward": 1}])
    [group] = iter_trace_groups(path)
    assert group.prompt == turns[:2]
    assert group.traces[0].response == turns[2:]
    assert group.traces[0].response_text == "4"


def test_without_prompt_len_the_last_turn_is_the_response(tmp_path: Path) -> None:
    row = chat_trace("q", "a", 1.0)
    del row["prompt_len"]
    [group] = iter_trace_groups(write_lines(tmp_path / "t.jsonl", [row]))
    assert group.traces[0].response == "a"


def test_preference_rows_are_two_traces_each(tmp_path: Path) -> None:
    scored = {"prompt": "q", "chosen": "good", "rejected": "bad", "score_chosen": 8.5, "score_rejected": 2}
    plain = {"prompt": "p", "chosen": "yes", "rejected": "no"}
    report = ReadReport()
    path = write_lines(tmp_path / "scored.jsonl", [scored])
    [group] = iter_trace_groups(path, report=report)
    assert [(one.response, one.reward) for one in group.traces] == [("good", 8.5), ("bad", 2.0)]
    assert (report.rows, report.kept) == (2, 2)
    assert groups_of(write_lines(tmp_path / "plain.jsonl", [plain])) == {"p": [("yes", 1.0), ("no", 0.0)]}


def test_columns_by_other_names(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "text": "a",
        "score": 1,
        "grp": 7,
        "who": "m",
        "at": "2026-03-01T10:00:00+02:00",
        "gold": "a",
    }
    named = {"input": "question", "output": "text", "reward": "score", "group_id": "grp", "model": "who", "time": "at"}
    columns = TraceColumns(**named, reference="gold")
    [group] = iter_trace_groups(write_lines(tmp_path / "t.jsonl", [row]), columns)
    [found] = group.traces
    assert (found.group_id, found.model, found.reward, found.reference) == ("7", "m", 1.0, "a")
    assert found.time == datetime(2026, 3, 1, 8, tzinfo=UTC)
    assert found.origin.endswith("t.jsonl, row 1")


def test_a_missing_column_is_an_error_that_lists_the_columns(tmp_path: Path) -> None:
    for path in (
        write_lines(tmp_path / "t.jsonl", [{"input": "q", "output": "a", "reward": 1}]),
        write_parquet(tmp_path / "t.parquet", [{"input": "q", "output": "a", "reward": 1}]),
    ):
        with pytest.raises(
            DataError, match=r"no column 'final_reward' \(reward\) .*'input', 'output', 'reward'.*--reward"
        ):
            list(iter_trace_groups(path))
    with pytest.raises(DataError, match="no column 'wrong'"):
        list(iter_trace_groups(path, TraceColumns(reward="reward", group_id="wrong")))


BAD_REWARDS = [None, float("nan"), float("inf"), "0.9", [1]]


@pytest.mark.parametrize("shape", ["text", "chat"])
def test_bad_rows_are_named_and_counted_and_the_rest_is_used(tmp_path: Path, shape: str) -> None:
    make = trace if shape == "text" else chat_trace
    good = [make(f"q{n}", "a", n % 2) for n in range(20)]
    bad = [make("q", "a", reward) for reward in BAD_REWARDS]
    missing = make("q", "a", 1.0)
    del missing["final_reward"]
    lines = [json.dumps(row) for row in [*good, *bad, missing]]
    lines[3:3] = ['{"input": "cut off', "[1, 2]", ""]
    lines.append(json.dumps(make("q", "a", 1)).replace('"a"', '"\\ud800"'))
    path = tmp_path / "t.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"input": "\xff"}\n')
    report = ReadReport()
    found = list(iter_trace_groups(str(path), report=report))
    assert len(found) == 20
    counts = {reason: tally.count for reason, tally in report.problems.items()}
    assert counts == {
        "broken JSON": 1,
        "not a record": 1,
        "text is not valid Unicode": 2,
        "no reward": 2,
        "reward is NaN, infinite or beyond ±1e+30": 2,
        "reward is not a number": 2,
    }
    assert report.problems["broken JSON"].examples == [f"{path}, row 4"]
    assert report.rows == 30
    assert is_complete(report)
    assert not report.filtered


def test_bad_rewards_in_parquet(tmp_path: Path) -> None:
    rows = [trace("q", "a", 1.0), trace("q", "b", None), trace("q", "c", float("nan")), trace(None, "d", 1.0)]
    report = ReadReport()
    list(iter_trace_groups(write_parquet(tmp_path / "t.parquet", rows), report=report))
    assert {reason: tally.examples for reason, tally in report.problems.items()} == {
        "no reward": [f"{tmp_path}/t.parquet, row 2"],
        "reward is NaN, infinite or beyond ±1e+30": [f"{tmp_path}/t.parquet, row 3"],
        "no prompt": [f"{tmp_path}/t.parquet, row 4"],
    }
    assert is_complete(report)


def test_messages_that_do_not_fit(tmp_path: Path) -> None:
    rows = [
        {**chat_trace("q", "a", 1), "prompt_len": 2},
        {**chat_trace("q", "a", 1), "prompt_len": 0},
        {**chat_trace("q", "a", 1), "prompt_len": "1"},
        {**chat_trace("q", "a", 1), "messages": [{"role": "user"}, {"content": "a"}]},
        {**chat_trace("q", "a", 1), "messages": "text"},
        {**chat_trace("q", "a", 1), "messages": [{"role": "user", "content": "q"}, {"role": "user", "content": "q?"}]},
        chat_trace("q", "a", 1),
    ]
    report = ReadReport()
    list(iter_trace_groups(write_lines(tmp_path / "t.jsonl", rows), report=report))
    counts = {reason: tally.count for reason, tally in report.problems.items()}
    assert counts == {
        "prompt_len does not fit the messages": 3,
        "messages without role and content": 2,
        "no response": 1,
    }
    assert report.kept == 1


def test_two_parquet_columns_of_one_name_are_refused_where_they_are_used(tmp_path: Path) -> None:
    path = str(tmp_path / "t.parquet")
    values: list[list[Any]] = [["q"], ["a"], [1.0], [0.0]]
    parquet.write_table(pa.table(values, names=["input", "output", "final_reward", "final_reward"]), path)
    with pytest.raises(DataError, match=r"t\.parquet: has two columns 'final_reward'"):
        groups_of(path)
    parquet.write_table(pa.table([*values[:3], [1], [2]], names=["input", "output", "final_reward", "x", "x"]), path)
    assert groups_of(path) == {"q": [("a", 1.0)]}


def test_a_truncated_parquet_file_is_an_error_or_named_in_the_report(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", random_rows(50, 5))
    whole = Path(write_parquet(tmp_path / "b.parquet", random_rows(50, 5))).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.parquet: not a readable Parquet file, perhaps cut off"):
        list(iter_trace_groups(str(tmp_path)))
    report = ReadReport()
    list(iter_trace_groups(str(tmp_path), report=report, broken_files="skip"))
    assert list(report.broken_files) == [f"{tmp_path}/b.parquet"]
    assert (report.rows, report.kept, report.files) == (50, 50, 2)
    with pytest.raises(DataError, match="no file can be read"):
        list(iter_trace_groups(str(tmp_path / "b.parquet"), broken_files="skip"))


def test_what_a_cut_off_gzip_file_still_holds_is_used(tmp_path: Path) -> None:
    rows = random_rows(4000, 50)
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "t.jsonl.gz").write_bytes(packed[: 2 * len(packed) // 3])
    report = ReadReport()
    found = groups_of(str(tmp_path), report=report, broken_files="skip")
    assert "cut off" in report.broken_files[f"{tmp_path}/t.jsonl.gz"]
    assert 1000 < report.kept == report.rows < 4000
    assert found == slow_groups(rows[: report.kept])
    with pytest.raises(DataError, match="cut off"):
        list(iter_trace_groups(str(tmp_path)))


def test_a_gzip_file_of_several_parts(tmp_path: Path) -> None:
    rows = random_rows(60, 9)
    parts = [gzip.compress("".join(json.dumps(row) + "\n" for row in rows[n : n + 20]).encode()) for n in (0, 20, 40)]
    (tmp_path / "t.jsonl.gz").write_bytes(b"".join(parts))
    assert groups_of(str(tmp_path / "t.jsonl.gz")) == slow_groups(rows)


def test_a_column_whose_type_changes_late_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block decides how lines are parsed; later ones that do not fit are read record by record."""
    monkeypatch.setattr("posttrain.data.traces.files.BLOCK_BYTES", 500)
    monkeypatch.setattr("posttrain.data.traces.files.READ_BYTES", 100)
    rows = [trace(f"q{n % 7}", f"a{n}", n % 2, group_id="x") for n in range(100)]
    rows[70].update(group_id=5)
    rows[80].update(final_reward="high")
    report = ReadReport()
    found = list(iter_trace_groups(write_lines(tmp_path / "t.jsonl", rows), report=report))
    assert sum(len(group.traces) for group in found) == 99
    assert {one.group_id for group in found for one in group.traces} == {"x", "5"}
    assert report.problems["reward is not a number"].examples == [f"{tmp_path}/t.jsonl, row 81"]


def test_text_that_looks_like_a_date_stays_text(tmp_path: Path) -> None:
    rows = [trace("2026-01-01", "2026-01-02", 1.0)] * 3
    assert list(groups_of(write_lines(tmp_path / "t.jsonl", rows))) == ["2026-01-01"]


def test_row_groups_larger_than_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.traces.files.BLOCK_BYTES", 2000)
    rows = random_rows(3000, 100)
    report = ReadReport()
    assert groups_of(write_parquet(tmp_path / "t.parquet", rows), report=report) == slow_groups(rows)
    assert is_complete(report)


def test_parquet_with_dictionaries_and_large_strings(tmp_path: Path) -> None:
    rows = random_rows(50, 5)
    table = pa.table(
        {
            "input": pa.array([row["input"] for row in rows]).dictionary_encode(),
            "output": pa.array([row["output"] for row in rows], pa.large_string()),
            "final_reward": pa.array([row["final_reward"] for row in rows], pa.float32()),
            "model": pa.array(["m"] * 50).dictionary_encode(),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    [*groups] = iter_trace_groups(str(tmp_path / "t.parquet"), filters=TraceFilters(where={"model": "m"}))
    assert {str(group.prompt): [one.response for one in group.traces] for group in groups} == {
        prompt: [response for response, _ in answers] for prompt, answers in slow_groups(rows).items()
    }


def test_files_of_a_folder_and_of_a_pattern_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "b.jsonl", [trace("b", "1", 1)])
    write_parquet(tmp_path / "a.parquet", [trace("a", "1", 1)])
    write_lines(tmp_path / "sub" / "c.jsonl.gz", [trace("c", "1", 1)])
    (tmp_path / "README.md").write_text("no data")
    assert list(groups_of(str(tmp_path))) == ["a", "b", "c"]
    assert list(groups_of(str(tmp_path / "*.jsonl"))) == ["b"]
    both = iter_trace_groups([str(tmp_path / "b.jsonl"), str(tmp_path)])
    assert [group.prompt for group in both] == ["b", "a", "c"]
    (tmp_path / "t.csv").write_text("input\n")
    with pytest.raises(DataError, match=r"t\.csv: files of this kind"):
        list(iter_trace_groups(str(tmp_path / "t.csv")))
    with pytest.raises(DataError, match="file or folder not found"):
        list(iter_trace_groups(str(tmp_path / "nothing")))
    with pytest.raises(DataError, match="no file of traces"):
        list(iter_trace_groups(str(tmp_path / "*.arrow")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        list(iter_trace_groups(str(tmp_path / "empty.jsonl")))


def test_reading_traces_does_not_import_torch() -> None:
    import subprocess
    import sys

    script = "import sys, posttrain.data.traces, posttrain.cli.data_command; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("ids", [[1.0, 2.0], [True, False], [0.5, 1e20], [3, 4.0]])
def test_ids_that_are_no_texts_hold_groups_together_from_block_to_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[Any]
) -> None:
    # The first block of a jsonl file is read as records, the next ones as Arrow columns: both must write ids alike.
    monkeypatch.setattr(files, "BLOCK_BYTES", 400)
    monkeypatch.setattr(files, "READ_BYTES", 100)
    rows = [trace(f"q{n % 2}", f"a{n}", n / 100, group_id=ids[n % 2]) for n in range(40)]
    found = list(iter_trace_groups(write_lines(tmp_path / "t.jsonl", rows)))
    assert [len(group.traces) for group in found] == [20, 20]
    table = parquet_of(rows, tmp_path / "t.parquet")
    assert [group.group_id for group in iter_trace_groups(table)] == [group.group_id for group in found]


def parquet_of(rows: list[dict[str, Any]], path: Path) -> str:
    ids = [row["group_id"] for row in rows]
    if {type(one) for one in ids} == {int, float}:  # a column has one type
        rows = [{**row, "group_id": float(row["group_id"])} for row in rows]
    return write_parquet(path, rows)


def test_a_number_of_thousands_of_digits_is_a_broken_line(tmp_path: Path) -> None:
    good = json.dumps(trace("q", "a", 1.0))
    (tmp_path / "t.jsonl").write_text(good + "\n" + good.replace("1.0", "9" * 5000) + "\n")
    report = ReadReport()
    assert groups_of(str(tmp_path / "t.jsonl"), report=report) == {"q": [("a", 1.0)]}
    assert report.problems["broken JSON"].count == 1
    assert is_complete(report)


def test_content_in_parts_is_its_text(tmp_path: Path) -> None:
    rows = [chat_trace([{"type": "text", "text": "q"}], [{"type": "text", "text": "a"}, {"text": "b"}], 1.0)]
    [group] = iter_trace_groups(write_lines(tmp_path / "t.jsonl", rows))
    assert group.prompt == [{"role": "user", "content": "q"}]
    assert group.traces[0].response == "ab"


@pytest.mark.parametrize("content", [7, None, {"text": "a"}, [{"type": "image_url"}], ["a"]])
def test_content_that_is_no_text_is_counted(tmp_path: Path, content: Any) -> None:
    rows = [chat_trace("q", "a", 1.0), chat_trace("q", content, 0.0)]
    rows[1]["messages"][1]["name"] = "bot"  # a key that says nothing
    report = ReadReport()
    [group] = iter_trace_groups(write_lines(tmp_path / "t.jsonl", rows), report=report)
    assert [one.reward for one in group.traces] == [1.0]
    assert {reason: tally.count for reason, tally in report.problems.items()} == {
        "messages without role and content": 1
    }


def test_a_column_filter_reads_dictionaries_with_unsigned_indices(tmp_path: Path) -> None:
    # As Polars writes categories.
    models = pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.uint32()), pa.array(["m", "n"]))
    table = pa.table({"input": ["q"] * 3, "output": ["a", "b", "c"], "final_reward": [1.0, 0.0, 0.5], "model": models})
    parquet.write_table(table, tmp_path / "t.parquet")
    path = str(tmp_path / "t.parquet")
    assert groups_of(path, filters=TraceFilters(where={"model": "n"})) == {"q": [("c", 0.5)]}
    assert groups_of(path, filters=TraceFilters(where={"model": None})) == {"q": [("b", 0.0)]}


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
def test_an_answer_column_that_repeats_the_prompt_gives_the_answer_alone(tmp_path: Path, prompt: Any) -> None:
    # As UltraFeedback has it: `chosen` and `rejected` are whole conversations.
    asked = {"role": "user", "content": "q"}
    row = {
        "prompt": prompt,
        "chosen": [asked, {"role": "assistant", "content": "good"}],
        "rejected": [asked, {"role": "assistant", "content": "bad"}],
    }
    other = {**row, "rejected": [{"role": "user", "content": "other"}, {"role": "assistant", "content": "bad"}]}
    report = ReadReport()
    [group] = iter_trace_groups(write_lines(tmp_path / "t.jsonl", [row, other]), report=report)
    assert [one.response for one in group.traces] == ["good", "bad", "good"]
    assert report.problems["the response begins with turns that are not its prompt"].count == 1
    assert is_complete(report)
