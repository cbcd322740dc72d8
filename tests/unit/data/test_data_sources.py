"""Rows come out of every supported file with their place, and what is wrong with a file is said with its name and
line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from posttrain.data import sources
from posttrain.data.errors import DataError
from posttrain.data.sources import Row, read_hub, read_local

RECORDS = [{"input": "a b", "output": "1"}, {"input": "ü, \u2028 x", "output": "2"}]


def lines(records: list[dict[str, str]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_all_formats(folder: Path) -> list[Path]:
    import pyarrow
    from pyarrow import parquet

    (folder / "a.jsonl").write_text(lines(RECORDS), encoding="utf-8")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS).encode()))
    (folder / "list.json").write_text(json.dumps(RECORDS), encoding="utf-8")
    (folder / "lines.json").write_text(lines(RECORDS), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "a.parquet")
    (folder / "a.csv").write_text('input,output\na b,1\n"ü, \u2028 x",2\n', encoding="utf-8-sig")
    return sorted(folder.iterdir())


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    files = write_all_formats(tmp_path)
    assert len(files) == 6
    for file in files:
        assert [row.values for row in read_local(str(file))] == RECORDS, file.name


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\ufeff" + lines(RECORDS[:1]) + "\n\n" + lines(RECORDS[1:]), encoding="utf-8")
    assert [row.number for row in read_local(str(file))] == [1, 4]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: broken JSON"),
        ("a.jsonl", b"[1, 2]\n", r"a\.jsonl:1: expected an object with keys, found list"),
        ("a.json", b'["x"]', r"a\.json:1: expected an object"),
        ("a.json", b'[{"a": 1', r"a\.json: broken JSON"),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', r"a\.jsonl:1: broken JSON: the key 'a' is set twice"),
        ("a.jsonl", b'{"a": ' + b"[" * 200_000, r"a\.jsonl:1: broken JSON: nested more than 100 deep"),
        ("a.json", b"[" * 200_000, r"a\.json: broken JSON: nested more than 100 deep"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", r"a\.jsonl:1: broken JSON: a number has too many digits"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"\n \n", "the file is empty"),
        ("a.json", b"[]", "the file is empty"),
        ("a.csv", b"a,b\n", "the file is empty"),
        ("a.csv", b"a,b\n1,2,3\n", r"a\.csv:2: more cells"),
        ("a.csv", b"a,final_reward,final_reward\n1,2,3\n", r"a\.csv: has two columns 'final_reward'"),
        ("a.jsonl", b'{"a": "\xff"}\n', "not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "broken gzip file"),
        ("a.jsonl.gz", b'{"a": 1}\n', "broken gzip file"),
        ("a.parquet", b"no parquet", "not a readable parquet file"),
        ("a.txt", b"text", r"files of this kind are not read; expected one of \.jsonl"),
    ],
)
def test_bad_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        list(read_local(str(tmp_path / name)))


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "a.parquet")
    parquet.write_table(pa.table([[1.0], [2.0]], names=["final_reward"] * 2), file)
    with pytest.raises(DataError, match=r"a\.parquet: has two columns 'final_reward'"):
        list(read_local(file))
    record = pa.StructArray.from_arrays([pa.array([1])] * 2, names=["reward"] * 2)
    parquet.write_table(pa.table({"info": pa.ListArray.from_arrays([0, 1], record)}), file)
    with pytest.raises(DataError, match=r"two columns 'info\.element\.reward'"):
        list(read_local(file))


def test_missing_file_is_named_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(RECORDS))
    with pytest.raises(DataError, match=r"not found: .*trian\.jsonl \(did you mean 'train\.jsonl'\?\)"):
        list(read_local(str(tmp_path / "trian.jsonl")))
    with pytest.raises(DataError) as refused:
        list(read_local(str(tmp_path / "pairs.jsonl")))
    assert "did you mean" not in str(refused.value), "the same ending makes no two names alike"


def test_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "my_test", "training_notes"):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"name": name}]))
    (tmp_path / "README.md").write_text("no data")

    def names(split: str | None, default_split: str = "train") -> list[str]:
        return [row.values["name"] for row in read_local(str(tmp_path), split, default_split=default_split)]

    assert names(None) == names("train") == ["train-00000-of-00002", "train-00001-of-00002"]
    assert names("test") == names(None, "test") == ["my_test"]
    with pytest.raises(DataError, match=r"no file for the split 'validation' among my_test\.jsonl"):
        names("validation")
    with pytest.raises(DataError, match="a slice works for hub datasets only"):
        names("train[:10]")


def test_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"name": name}]))
    assert [row.values["name"] for row in read_local(str(tmp_path))] == ["a", "b"]
    with pytest.raises(DataError, match="no file for the split 'test'"):
        list(read_local(str(tmp_path), "test"))


def test_folder_of_a_hub_dataset_with_several_subsets_needs_the_subset(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        for split in ("train", "test"):
            table = pyarrow.Table.from_pylist([{"name": subset}])
            parquet.write_table(table, tmp_path / subset / f"{split}-00000-of-00001.parquet")
    with pytest.raises(
        DataError, match="several subsets have the split 'train': main, socratic; choose one with `subset`"
    ):
        list(read_local(str(tmp_path)))
    assert [row.values["name"] for row in read_local(str(tmp_path), subset="socratic")] == ["socratic"]


def test_subset_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "rows.jsonl").write_text(lines(RECORDS))
    assert len(list(read_local(str(tmp_path), subset="main"))) == 2
    with pytest.raises(DataError, match="no folder for the subset 'other'"):
        list(read_local(str(tmp_path), subset="other"))
    with pytest.raises(DataError, match="is a single file and has no subset"):
        list(read_local(str(tmp_path / "main" / "rows.jsonl"), subset="main"))


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file in this folder"):
        list(read_local(str(tmp_path)))


def test_patterns_and_urls_are_read(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "a1.jsonl").write_text(lines(RECORDS))
    (tmp_path / "a2.jsonl").write_text(lines(RECORDS))
    assert len(list(read_local(str(tmp_path / "a*.jsonl")))) == 4
    with pytest.raises(DataError, match="no data file matches"):
        list(read_local(str(tmp_path / "b*.jsonl")))
    with fsspec.open("memory://bucket/rows.jsonl", "w") as remote:
        remote.write(lines(RECORDS))
    rows = list(read_local("memory://bucket/rows.jsonl"))
    assert [row.values for row in rows] == RECORDS
    assert rows[0].where == "memory://bucket/rows.jsonl, row 1"


def test_saved_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(str(tmp_path / "saved"))
    assert [row.values for row in read_local(str(tmp_path / "saved"))] == RECORDS
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        list(read_local(str(tmp_path / "saved"), "test"))


def test_unreachable_hub_dataset_names_the_remedy() -> None:
    with pytest.raises(DataError, match=r"nobody/nothing.*Point `data_path` at local files"):
        list(read_hub("nobody/nothing", (None,), "train"))


def test_missing_key_names_file_row_keys_and_setting() -> None:
    row = Row({"question": "?", "answer": None}, "d.jsonl", 7)
    with pytest.raises(
        DataError, match=r"d\.jsonl, row 7: no key 'questions' .did you mean 'question'.*'question', 'answer'"
    ):
        row.field("questions")
    with pytest.raises(DataError, match="name the right one with `input_key`"):
        row.field("input", setting="input_key")
    with pytest.raises(DataError, match=r"d\.jsonl, row 7: 'answer' is null"):
        row.field("answer")


def test_field_takes_the_first_name_present_and_reaches_into_records() -> None:
    row = Row({"a": {"b": 3}, "a.c": 4}, "d.jsonl", 1)
    assert row.field("x", "a.b") == 3
    assert row.field("a.c") == 4
    assert row.get("a.b.c") is None


def test_a_pipe_and_a_device_are_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl"):
        with pytest.raises(DataError, match=f"{name}: not a regular file"):
            list(read_local(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.json", "a.json.gz"])
def test_a_line_without_an_end_is_not_read_to_its_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "MAX_JSON_BYTES", 1 << 20)
    content = (b"input\n" if "csv" in name else b"") + b'{"input": "' + b"a" * (2 << 20)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=r"a line of more than 1 MiB|of JSON in one; write one object a line"):
        list(read_local(str(tmp_path / name)))


def test_a_long_line_within_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "x" * 3_000_000}) + "\n")
    assert [len(row.values["input"]) for row in read_local(str(tmp_path / "a.jsonl"))] == [3_000_000]


def test_damage_anywhere_in_a_parquet_file_is_refused_with_its_name(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(RECORDS * 20), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    damaged, refused = tmp_path / "b.parquet", 0
    for position in range(4, len(whole) - 4, 7):
        content = bytearray(whole)
        content[position : position + 2] = b"\xff\x0f"
        damaged.write_bytes(content)
        try:
            list(read_local(str(damaged)))
        except DataError as error:
            assert "b.parquet" in str(error)  # noqa: PT017 - most damage is found, and some changes a value only
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "path",
    ["http://127.0.0.1:1/x.jsonl", "ftp://user:password@127.0.0.1:1/x.jsonl", "data:text/plain,abc",
        "zip://x.jsonl::/etc/hostname",
     "zip://x.jsonl::/no/such/file", "nonsense://x.jsonl"],
)  # fmt: skip
def test_an_address_that_cannot_be_read_is_named_with_the_reason(path: str) -> None:
    with pytest.raises(DataError, match=f"{re.escape(path)}: "):
        list(read_local(path))


def test_half_of_a_surrogate_pair_is_refused_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "\\ud83d\\ude00"}\n{"input": "x\\ud83dy"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: a text is not valid Unicode: half of a surrogate pair in .*x"):
        list(read_local(str(tmp_path / "a.jsonl")))


def test_a_disk_that_fails_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Iterator[Row]:
        raise OSError(errno.EIO, "Input/output error", "rows.jsonl")
        yield

    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setattr(sources, "read_file", failing)
    with pytest.raises(OSError, match="Input/output error"):
        list(read_local(str(tmp_path / "rows.jsonl")))
