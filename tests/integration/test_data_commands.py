"""`posttrain data inspect`, `advise` and `pairs` as a user types them: real traces, damaged files, and S3."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(["data", *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code, out, error = call(capsys, *arguments, "--json")
    assert code == 0, error
    return dict(json.loads(out))


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"the data set {name} is not here")
    return SHARED / name


def damaged_folder(folder: Path) -> None:
    """Good rows, a row without reward, a NaN reward, a broken line, and a Parquet file that was cut off."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"input": f"q{n % 10}", "output": f"a{n}", "final_reward": float(n // 10 % 2)} for n in range(0, 100, 3)]
    lines = [json.dumps(row) for row in rows]
    answer = '{"input": "q1", "output": "x"'
    lines += [answer + "}", answer + ', "final_reward": NaN}', '{"input": "q1", ']
    (folder / "a.jsonl").write_text("\n".join(lines))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "b.parquet")
    whole = (folder / "b.parquet").read_bytes()
    (folder / "c.parquet").write_bytes(whole[:-100])


# -- the data sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "groups", "signal", "pairs"),
    [
        ("traces/gsm8k_model_solutions.jsonl.gz", 4220, 1055, 575, 575),
        ("traces/math_cot_8x.jsonl.gz", 792, 99, 10, 10),
        ("traces/tau_airline_gpt4o.jsonl.gz", 200, 50, 26, 2),
        ("traces_noncommercial/alpaca_eval_judged.jsonl.gz", 2250, 250, 250, 228),
    ],
)
def test_inspect_finds_what_the_data_sets_say_of_themselves(
    capsys: pytest.CaptureFixture[str], name: str, rows: int, groups: int, signal: int, pairs: int
) -> None:
    found = numbers(capsys, "inspect", shared(name))
    assert (found["read"]["rows"], found["read"]["kept"]) == (rows, rows)
    assert (found["groups"]["count"], found["groups"]["with_signal"]) == (groups, signal)
    assert found["pairs"]["pairs"] == pairs
    assert found["pairs"]["pairs"] + sum(found["pairs"]["prompts_without_pairs"].values()) == found["pairs"]["prompts"]


def test_pairs_of_all_traces_can_be_trained_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from posttrain.data.named_datasets import PREFERENCE_DATASETS
    from posttrain.data.preference_shapes import read_preference
    from posttrain.data.sources import read_local

    for form in ("aligner", "trl"):
        out = tmp_path / f"{form}.jsonl"
        found = numbers(capsys, "pairs", shared("traces"), out, "--format", form)
        assert found["pairs"]["pairs"] == 587
        read = [read_preference(row, PREFERENCE_DATASETS[0]) for row in read_local(str(out))]
        assert len(read) == found["lines"] == (585 if form == "aligner" else 587)
        single = [said for said in read if not said.problem]
        assert len(single) >= 585
        assert all(said.chosen != said.rejected and not said.templated for said in single)
        assert {said.chosen_reward for said in single} == {1.0}


def test_preference_files_are_traces_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = shared("preferences/ultrafeedback_test.jsonl.gz")
    found = numbers(capsys, "pairs", path, tmp_path / "x.jsonl", "--strategy", "by_margin", "--min-margin", "3")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert found["lines"] == sum(row["score_chosen"] - row["score_rejected"] >= 3 for row in rows) > 0


def test_advise_prints_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    path = shared("traces/gsm8k_model_solutions.jsonl.gz")
    code, out, _ = call(capsys, "advise", path, "--min-margin", "0.5")
    assert code == 0
    assert out.startswith("DPO")
    assert f"posttrain data pairs {path} pairs.jsonl --min-margin 0.5" in out


# -- looks -------------------------------------------------------------------------------------------------------------


def test_inspect_of_a_file_without_a_usable_row_shows_why_and_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "binary.jsonl"
    file.write_bytes(bytes(range(256)) * 4)
    code, out, err = call(capsys, "inspect", file)
    assert code == 64
    assert "text is not valid Unicode" in out
    assert "none of its 5 rows can be used" in err


def test_inspect_draws_and_names_what_is_lost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damaged_folder(tmp_path)
    code, out, _ = call(capsys, "inspect", tmp_path, "--picture", tmp_path / "r.svg")
    assert code == 0
    unwrapped = " ".join(out.split())
    assert "rows 71" in unwrapped
    assert "traces used 68 of 71" in unwrapped
    for reason in ("1 rows, no reward", "1 rows, reward is NaN", "1 rows, broken JSON", "broken file"):
        assert reason in unwrapped
    assert "█" in out
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


def test_png_needs_no_more_than_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the dev extra is not installed")
    damaged_folder(tmp_path)
    assert call(capsys, "inspect", tmp_path, "--picture", tmp_path / "r.png")[0] == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_pairs_stops_at_a_damaged_file_by_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damaged_folder(tmp_path)
    out = tmp_path / "pairs.jsonl"
    code, _, error = call(capsys, "pairs", tmp_path, out)
    assert code == 64
    assert "c.parquet: not a readable Parquet file" in error
    assert not out.exists()
    found = numbers(capsys, "pairs", tmp_path, out, "--skip-broken-files")
    assert list(found["read"]["broken_files"]) == [f"{tmp_path}/c.parquet"]
    read = found["read"]
    lost = sum(one["rows"] for part in ("problems", "filtered") for one in read[part].values())
    assert read["rows"] == read["kept"] + lost == 71
    assert found["lines"] == len(out.read_text().splitlines()) == found["pairs"]["pairs"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing-there.jsonl"], "file or folder not found: nothing-there.jsonl"),
        (["inspect", "{t}", "--reward", "score"], "no column 'score' (reward)"),
        (["inspect", "{t}", "--picture", "r.gif"], "a picture is written as .svg or .png"),
        (["inspect", "{t}", "--where", "model"], "expected COLUMN=VALUE"),
        (["inspect", "{t}", "--since", "soon"], "since: 'soon' is not a date"),
        (["inspect", "{t}", "--tokenizer", "no/such-tokenizer"], "--tokenizer: no folder 'no/such-tokenizer'"),
        (["pairs", "{t}", "out.txt"], "the name must end in .jsonl"),
        (["pairs", "{t}", "a.jsonl", "--format", "trl", "b.jsonl"], "unexpected: 'b.jsonl'"),
        (["pairs", "{t}", "a.jsonl", "--strategy", "by_margin"], "min_margin"),
        (["pairs", "{t}", "a.jsonl", "--strategy", "some"], "invalid choice"),
        (["inspect"], "required: PATH"),
        ([], "required: COMMAND"),
        (["inspect", "{t}", "--scratch", "nowhere"], "scratch: no folder 'nowhere'"),
        (["inspect", "{t}", "--picture", "folder.svg"], "folder.svg: is a folder"),
        (["pairs", "{t}", "folder.jsonl"], "folder.jsonl: is a folder"),
    ],
)
def test_bad_input_is_named_and_exits_with_64(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"input": "q", "output": f"a{n}", "final_reward": n} for n in range(2)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in ("folder.svg", "folder.jsonl"):
        (tmp_path / folder).mkdir()
    code, _, error = call(capsys, *[word.format(t="t.jsonl") for word in arguments])
    assert code == 64
    assert message in error


# -- s3:// -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    moto_server = pytest.importorskip("moto.server", reason="the dev extra is not installed")
    # A free port, kept from here on.
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """`s3://lake/labelled` with the damaged folder in it; endpoint and credentials only in the environment."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    (tmp_path / "local").mkdir()
    damaged_folder(tmp_path / "local")
    filesystem = s3fs.S3FileSystem()
    filesystem.mkdir("lake")
    filesystem.put(str(tmp_path / "local"), "lake/labelled", recursive=True)
    yield "s3://lake/labelled"
    filesystem.rm("lake", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3_gives_what_local_files_give(capsys: pytest.CaptureFixture[str], bucket: str, tmp_path: Path) -> None:
    local, remote = (numbers(capsys, "inspect", path) for path in (tmp_path / "local", bucket))
    assert list(remote["read"]["broken_files"]) == ["s3://lake/labelled/c.parquet"]
    assert remote["read"]["problems"]["no reward"]["first"] == ["s3://lake/labelled/a.jsonl, row 35"]
    shared_numbers = ("groups", "rewards", "duplicates", "lengths", "pairs")
    assert {name: remote[name] for name in shared_numbers} == {name: local[name] for name in shared_numbers}
    assert remote["read"]["kept"] == local["read"]["kept"] == 68

    for pattern in ("*.jsonl", "b.parquet"):
        outs = [tmp_path / "local.jsonl", tmp_path / "remote.jsonl"]
        for path, out in zip((tmp_path / "local" / pattern, f"{bucket}/{pattern}"), outs, strict=True):
            assert call(capsys, "pairs", path, out)[0] == 0
        assert outs[0].read_bytes() == outs[1].read_bytes()


def test_s3_places_that_are_not_there(capsys: pytest.CaptureFixture[str], bucket: str) -> None:
    missing = [("s3://lake/nothing.parquet", "not found"), ("s3://no-such-bucket/x/*.jsonl", "s3://no-such-bucket")]
    for path, message in missing:
        code, _, error = call(capsys, "inspect", path)
        assert code == 64, error
        assert message in error


def test_the_benchmark_measures_rows_and_memory(tmp_path: Path) -> None:
    bench = Path(__file__).parents[2] / "bench" / "traces.py"
    out = tmp_path / "numbers.json"
    command = [sys.executable, str(bench), "--rows", "3000", "--folder", str(tmp_path), "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert found["pairs"]["prompts"] == 375
    assert found["pairs"]["pairs"] == found["inspect"]["pairs"] > 300
    assert 0 < found["pairs"]["peak_gib"] < 1


def test_the_advised_run_reads_what_was_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every path, and values that YAML would take for something else."""
    from posttrain.config import load_config

    rows = [
        {"input": f"q{n // 3}", "output": f"a{n}", "final_reward": n % 3 / 2, "lang": "no", "who": "x, y"}
        for n in range(60)
    ]
    files = [tmp_path / "one file.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for paths in (files, files[:1]):
        filters = ["--where", "lang=no", "--where", "who=x, y", "--group-id", ""]
        advice = numbers(capsys, "advise", *paths, *filters)
        command = shlex.split(advice["commands"][0])
        assert command[:2] == ["posttrain", "grpo"]
        entries = load_config("grpo", None, command[2:]).config.data.train_sets()
        assert [entry.data_path for entry in entries] == [str(path) for path in paths]
        for entry in entries:
            assert entry.dataset_name == "TraceGroups"
            assert entry.trace_columns is not None
            assert entry.trace_columns.group_id == ""
            assert entry.trace_filters is not None
            assert entry.trace_filters.where == {"lang": ["no"], "who": ["x, y"]}
