"""Odd and hostile files in a run folder: they harm the pages of their own run only, and take bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import socket
import sqlite3
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from made_runs import HEADLINE, make_run, write_groups

from posttrain.apps.watch.access import Access
from posttrain.apps.watch.app import create_app
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.metric_table import MetricTable
from posttrain.apps.watch.places import LocalPlace
from posttrain.apps.watch.rollout_filters import Filters
from posttrain.apps.watch.rollout_store import RolloutStore, StepCache
from posttrain.apps.watch.shipping import pipeline_page, registry_page
from posttrain.reporting.examination import examine_folder

TOKEN = "0123456789abcdef-token"
PAGES = (
    "",
    "/curves?key=train/reward&key=train/loss",
    "/doctor",
    "/doctor?again=true",
    "/cluster",
    "/config",
    "/rollouts/train",
    "/rollouts/train/1",
    "/rollouts/train/1?sort=reward&q=the&reward_min=0",
    "/rollouts/train/1?sort=length_up&part=format&part_min=0",
    "/rollouts/train/1/0",
    "/rollouts/train/search?q=the",
    "/tokens/1/0/0",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    make_run(home / "good", steps=3)
    make_run(home / "odd", steps=3, status="running")
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "results"))


def client_of(home: Path, access: Access | None = None) -> TestClient:
    app = create_app(Catalogue([LocalPlace(home)]), access or Access(None))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def runs_of(client: TestClient) -> dict[str, dict[str, Any]]:
    answer = client.get("/api/runs")
    assert answer.status_code == 200, answer.text
    return {run["name"]: run for run in answer.json()["runs"]}


def odd_run(home: Path) -> dict[str, Any]:
    """The odd run in the list, after every page was asked for. No page fails, and those of the other run work."""
    client = client_of(home)
    runs = runs_of(client)
    assert runs["good"]["status"] == "finished"
    for page in PAGES:
        answer = client.get(f"/api/runs/{runs['odd']['id']}{page}")
        assert answer.status_code in (200, 404, 422), f"{page}: {answer.status_code} {answer.text[:300]}"
        assert str(home) not in answer.text
        if page not in ("/tokens/1/0/0",):
            assert client.get(f"/api/runs/{runs['good']['id']}{page}").status_code == 200
    both = {"run": [runs["good"]["id"], runs["odd"]["id"]]}
    assert client.get("/api/config-differences", params=both).status_code == 200
    assert runs_of(client)["good"]["status"] == "finished"
    return runs_of(client)["odd"]


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def listening(path: Path) -> None:
    path.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")


KINDS = {"a named pipe, not a file": pipe, "a socket, not a file": listening, "a folder, not a file": folder}
LINK = {"a link, which is not followed": link}


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "findings.jsonl", "attempts/0001.json"])
@pytest.mark.parametrize("reason", [*KINDS, *LINK])
def test_what_is_no_file_makes_its_run_unreadable(home: Path, name: str, reason: str) -> None:
    {**KINDS, **LINK}[reason](home / "odd" / name)
    odd = odd_run(home)
    assert (odd["status"], odd["reason"]) == ("unreadable", f"{name}: {reason}")


@pytest.mark.parametrize(
    "name", ["workers.jsonl", "unscored.jsonl", "config.yaml", "rollouts/step_1.jsonl.gz", "rollouts/step_1.tokens.npz"]
)
@pytest.mark.parametrize("make", [*KINDS.values(), link])
def test_what_is_no_file_hangs_no_page(home: Path, name: str, make: Callable[[Path], None]) -> None:
    make(home / "odd" / name)
    odd_run(home)


@pytest.mark.parametrize("name", ["rollouts", "attempts"])
def test_what_is_no_folder_hangs_no_page(home: Path, name: str) -> None:
    shutil.rmtree(home / "odd" / name)
    for make in (pipe, link):
        make(home / "odd" / name)
        odd_run(home)


def write_attempt(run: Path, heartbeat: str) -> None:
    (run / "attempts" / "0001.json").write_text('{"number": 1, "heartbeat": ' + heartbeat + "}")


@pytest.mark.parametrize("heartbeat", ['"soon"', "[1]", "true", "NaN", "1e999", "1" + "0" * 400])
def test_heartbeat_that_is_no_time_makes_its_run_unreadable(home: Path, heartbeat: str) -> None:
    write_attempt(home / "odd", heartbeat)
    odd = odd_run(home)
    assert odd["status"] == "unreadable"
    assert odd["reason"].startswith("attempts/0001.json: heartbeat is ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, 2", "run.json: "),
        (b"[1]", "run.json: not an object"),
        (b"\0" * 100, "run.json: "),
        (b'{"title": "\xff\xfe"}', "run.json: not UTF-8"),
        (b'{"a":' * 5000, "run.json: nested more than 100 deep"),
        (b"[" * 200 + b"]" * 200, "run.json: nested more than 100 deep"),
        (b'{"wall_s": ' + b"9" * 5000 + b"}", "run.json: a number has too many digits"),
        (b'{"title": "' + b"a" * 2**20 + b'"}', "run.json: more than 1 MiB"),
    ],
    ids=["torn", "list", "NUL bytes", "no UTF-8", "deep objects", "deep lists", "digits", "large"],
)
def test_damaged_info_makes_its_run_unreadable(home: Path, content: bytes, reason: str) -> None:
    (home / "odd" / "run.json").write_bytes(content)
    odd = odd_run(home)
    assert odd["status"] == "unreadable"
    assert odd["reason"].startswith(reason)
    assert odd["step"] == 3, "what can be read is shown"


def test_values_of_other_types_are_left_out(home: Path) -> None:
    wrong: list[Any] = [None, 5, "x", [1], {"a": 1}, True, 1e308, [[[]]], "\ud800", 10**100]
    names = ("title", "algorithm", "status", "reason", "max_steps", "wall_s", "num_devices", "device_word", "headline")
    names += ("started_at", "updated_at", "resumed_at_steps", "config_changes", "held_until", "warnings")
    for value in wrong:
        (home / "odd" / "run.json").write_text(json.dumps(dict.fromkeys(names, value)))
        odd_run(home)


METRICS = {
    "numbers": b'{"step": 4, "train/reward": 1e400, "train/loss": -1e308, "train/kl_penalty": 1' + b"0" * 400 + b"}\n",
    "NaN": b'{"step": 4, "train/reward": NaN, "train/loss": -Infinity}\n',
    "deep": b'{"step": 4, "train/reward": ' + b"[" * 50_000 + b"}\n",
    "NUL bytes": b"\0" * 100_000 + b"\n",
    "no UTF-8": b'{"step": 4, "train/\xff\xfe": 1}\n',
    "steps": b'{"step": -5, "train/reward": 1}\n{"step": 9007199254740991, "train/reward": 1}\n{"step": 1e9}\n',
    "texts": b'{"step": 4, "train/reward": "<script>", "train/loss": {"a": [1]}, "": 3, "train/": null}\n',
    "true": b'{"step": true, "train/reward": true}\n',
}


@pytest.mark.parametrize("name", METRICS)
def test_odd_rows_of_metrics_fail_no_page(home: Path, name: str) -> None:
    with (home / "odd" / "metrics.jsonl").open("ab") as file:
        file.write(METRICS[name])
    assert odd_run(home)["status"] != "unreadable"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"step": 4, "note": "' + b"a" * 10_000_000, "a line of more than 1 MiB"),
        (b'{"step": 4, "%s": 1}\n' % (b"a" * 501), "or the name of one has more than 500 characters"),
        (
            b"".join(b'{"step": %d, "%d": 1}\n' % (step, step) for step in range(4100)),
            "more than 4,096 metrics",
        ),
    ],
    ids=["10 MB line", "long name", "many metrics"],
)
def test_metrics_beyond_a_limit_make_their_run_unreadable(home: Path, content: bytes, reason: str) -> None:
    with (home / "odd" / "metrics.jsonl").open("ab") as file:
        file.write(content)
    assert reason in odd_run_after_its_page(home)["reason"]


def odd_run_after_its_page(home: Path) -> dict[str, Any]:
    """The list reads the end of a file only."""
    client = client_of(home)
    page = client.get(f"/api/runs/{runs_of(client)['odd']['id']}")
    assert page.status_code == 200
    assert page.json()["status"] == runs_of(client)["odd"]["status"] == "unreadable"
    return runs_of(client)["odd"]


def test_sparse_file_of_metrics_is_not_read(home: Path) -> None:
    os.truncate(home / "odd" / "metrics.jsonl", 2**40)
    assert odd_run_after_its_page(home)["reason"] == "metrics.jsonl: more than 512 MiB"


def test_metrics_of_many_columns_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.metric_table.MAX_VALUES", 100_000)
    rows = "".join(json.dumps({"step": step, f"train/{step}": 1.0}) + "\n" for step in range(3000))
    (tmp_path / "metrics.jsonl").write_text(rows)
    table = MetricTable(LocalPlace(tmp_path)).refresh()
    assert table.problem == "metrics.jsonl: more than 100,000 values"
    assert table.num_bytes < 1000


def test_file_that_shrinks_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "train/reward": 1.0}) + "\n" for step in range(1, 101)))

    class Shrinking(LocalPlace):
        def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            content = super().read(name, start, end)
            os.truncate(file, 40)
            return content[: len(content) // 2]

    table = MetricTable(Shrinking(tmp_path)).refresh()
    assert table.problem == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "train/reward": 1.0}\n')
    table._place = LocalPlace(tmp_path)
    assert table.refresh().last_step == 7


def test_file_that_may_not_be_read_makes_its_run_unreadable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = LocalPlace._open

    def refusing(self: LocalPlace, name: str, *wanted: int) -> int | None:
        if self.name == "odd" and name == "run.json":
            raise PermissionError(13, "Permission denied")
        return open_file(self, name, *wanted)

    monkeypatch.setattr(LocalPlace, "_open", refusing)
    odd = odd_run(home)
    assert (odd["status"], odd["reason"]) == ("unreadable", "run.json: Permission denied")


def test_run_that_cannot_be_shown_at_all_leaves_the_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.run_view.charts_of", lambda *_: 1 / 0)
    monkeypatch.setattr("posttrain.apps.watch.run_view.STALE_S", "unknown")
    runs = runs_of(client_of(home))
    assert (runs["good"]["status"], runs["odd"]["status"]) == ("finished", "unreadable")
    assert runs["odd"]["reason"] == "TypeError, see the log of posttrain watch"


# ---------------------------------------------------------------------- links


def test_links_out_of_the_folder_are_not_followed(home: Path, tmp_path: Path) -> None:
    elsewhere = make_run(tmp_path / "elsewhere" / "run", steps=2, title="secret title")
    (home / "linked").symlink_to(elsewhere)
    (home / "nested").mkdir()
    (home / "nested" / "linked").symlink_to(elsewhere)
    (home / "group").symlink_to(elsewhere.parent)
    (home / "same").symlink_to(home / "good")
    client = client_of(home)
    runs = runs_of(client)
    assert set(runs) == {"good", "odd", "linked", "nested/linked"}, "a link within the folder shows no run twice"
    for name in ("linked", "nested/linked"):
        assert runs[name]["status"] == "unreadable"
        assert "its folder is a link, which is not followed; give posttrain watch the folder" in runs[name]["reason"]
        for page in PAGES:
            answer = client.get(f"/api/runs/{runs[name]['id']}{page}")
            assert answer.status_code in (200, 404, 422)
            assert "secret title" not in answer.text
            assert "sums:" not in answer.text
            assert str(tmp_path) not in answer.text


def test_named_folder_may_be_a_link(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    assert runs_of(client_of(tmp_path / "link"))["good"]["status"] == "finished"


def test_config_of_the_system_is_not_shown(home: Path) -> None:
    client = client_of(home)
    for name in ("config.yaml", "config_from_step_2.yaml"):
        link(home / "odd" / name)
    odd = runs_of(client)["odd"]
    assert client.get(f"/api/runs/{odd['id']}/config").json() == {"configs": []}


# ---------------------------------------------------------------------- rollouts


def write_lines(run: Path, content: bytes) -> None:
    (run / "rollouts" / "step_1.jsonl.gz").write_bytes(gzip.compress(content, 9))


@pytest.fixture
def peak() -> Iterator[Callable[[], float]]:
    """Megabytes of memory since the last call."""
    tracemalloc.start()

    def since() -> float:
        found = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.reset_peak()
        return found

    yield since
    tracemalloc.stop()


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b'{"completions":[]}\n', b"[[[]]]\n"])
def test_short_lines_take_no_more_than_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: Callable[[], float], line: bytes
) -> None:
    monkeypatch.setattr("posttrain.apps.watch.rollout_store.MAX_STEP_BYTES", 8 * 2**20)
    (tmp_path / "rollouts").mkdir()
    write_lines(tmp_path, line * (16 * 2**20 // len(line)))
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    peak()
    lines = store.lines("train", 1)
    assert lines is not None
    assert len(lines) == 65_536
    assert lines.is_cut
    assert peak() < 40


def test_time_of_a_listing_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_lines(tmp_path, b'{"completions":[]}\n' * 10_000)
    ticks = iter(range(10_000))
    store = RolloutStore(LocalPlace(tmp_path), StepCache(), clock=lambda: float(next(ticks)))
    found = store.listing("train", 1, Filters())
    assert (found.num_groups, found.num_matching, found.is_cut) == (10_000, 64 * 11 - 1, True)
    hits = store.search("train", Filters(text="nothing"), None)
    assert hits.cursor is not None
    assert (hits.cursor.step, hits.cursor.index) == (1, 64 * 11 - 1)


@pytest.mark.parametrize(
    "line",
    [
        b'{"completions":[' + b"{}," * 2_000_000 + b"{}]}",
        b'{"id":"x","completions":[],"extra":[' + b"[]," * 2_000_000 + b"[]]}",
        b'{"completions":[],"prompt":"' + b"a" * (33 << 20) + b'"}',
    ],
    ids=["answers", "values", "bytes"],
)
def test_group_of_many_values_is_not_read(tmp_path: Path, peak: Callable[[], float], line: bytes) -> None:
    (tmp_path / "rollouts").mkdir()
    write_lines(tmp_path, line + b'\n{"completions":[]}\n')
    peak()
    found = RolloutStore(LocalPlace(tmp_path), StepCache()).listing("train", 1, Filters())
    assert (found.num_groups, found.num_unreadable, [row["index"] for row in found.groups]) == (2, 1, [1])
    assert peak() < 150


ROWS: list[Any] = [
    1,
    "text",
    None,
    [],
    [[{}]],
    {"completions": None},
    {"completions": 5},
    {"completions": "text"},
    {"completions": {"a": 1}},
    {"completions": [1, "a", None]},
    {"completions": [{"reward": "high"}]},
    {"completions": [{"reward": 10**400}]},
    {"completions": [{"reward": [1]}]},
    {"completions": [{"num_tokens": "many"}]},
    {"completions": [{"num_tokens": 10**400}]},
    {"completions": [{"text": 5}]},
    {"completions": [{"turns": 5}]},
    {"completions": [{"turns": ["a"]}]},
    {"prompt": ["a"], "completions": []},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda value: repr(value)[:50])
def test_row_that_is_no_group_is_counted_and_left_out(home: Path, row: Any) -> None:
    sound = {"draw": 0, "id": "a", "prompt": "the prompt", "completions": [{"reward": 1.0, "text": "the text"}]}
    write_groups(home / "odd", 1, [row, sound])
    odd_run(home)
    client = client_of(home)
    odd = runs_of(client)["odd"]["id"]
    for query in ("", "?sort=reward&q=the&spread_min=0"):
        found = client.get(f"/api/runs/{odd}/rollouts/train/1{query}").json()
        assert (found["total"], found["unreadable"], [one["index"] for one in found["groups"]]) == (2, 1, [1])
    assert client.get(f"/api/runs/{odd}/rollouts/train/1/0").status_code == 404


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"reward": float("nan"), "num_tokens": float("inf")},
        {"reward": True and 1, "parts": [1], "error": {"a": 1}, "finish_reason": 5},
        {"reward": -1e99, "advantage": "x", "versions": 7, "counts": [1]},
        {"reward": 1, "turns": [{}, {"text": [1]}]},
    ],
    ids=lambda value: repr(value)[:50],
)
def test_answers_of_other_versions_are_shown(home: Path, answer: Any) -> None:
    write_groups(home / "odd", 1, [{"id": [1], "draw": "x", "reference": {"a": [1]}, "completions": [answer] * 3}])
    odd_run(home)
    client = client_of(home)
    assert client.get(f"/api/runs/{runs_of(client)['odd']['id']}/rollouts/train/1/0").status_code == 200


# ---------------------------------------------------------------------- tokens


def arrays() -> dict[str, Any]:
    return {
        "draws": np.array([0]),
        "samples": np.array([0]),
        "ends": np.array([0, 2]),
        "token_ids": np.array([1, 2]),
        "trained": np.array([True, True]),
        "text": np.frombuffer(b"ab", np.uint8),
        "text_ends": np.array([0, 1, 2]),
        **{name: np.zeros(2) for name in ("sampler_logprobs", "trainer_logprobs", "advantages")},
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"ends": np.array(2)},
        {"ends": np.array([0, 10**12])},
        {"ends": np.array([0, -5])},
        {"ends": np.array([])},
        {"text_ends": np.array([0, 10**15, 2])},
        {"text_ends": np.array([0, 1])},
        {"draws": np.array(["a"])},
        {"sampler_logprobs": np.zeros((2, 2))},
        {"trained": np.zeros(1)},
        {"unknown": np.zeros(1)},
        {"text": np.zeros(2)},
    ],
    ids=lambda wrong: str(next(iter(wrong))),
)
def test_arrays_of_tokens_that_do_not_fit_are_not_shown(home: Path, wrong: dict[str, Any]) -> None:
    path = home / "odd" / "rollouts" / "step_1.tokens.npz"
    np.savez(path, **arrays())
    client = client_of(home)
    page = f"/api/runs/{runs_of(client)['odd']['id']}/tokens/1"
    assert client.get(f"{page}/0/0").json()["pieces"] == ["a", "b"]
    assert client.get(f"{page}/{10**30}/{-(10**30)}").status_code == 404
    np.savez(path, **{**arrays(), **wrong})
    assert client.get(f"{page}/0/0").status_code == 404


def test_tokens_that_unpack_to_any_size_are_not_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, peak: Callable[[], float]
) -> None:
    monkeypatch.setattr("posttrain.reporting.token_files.MAX_BYTES", 2**20)
    path = home / "odd" / "rollouts" / "step_1.tokens.npz"
    np.savez_compressed(path, **{**arrays(), "token_ids": np.zeros(8 * 2**20, np.int64)})
    client = client_of(home)
    page = f"/api/runs/{runs_of(client)['odd']['id']}/tokens/1/0/0"
    peak()
    assert client.get(page).status_code == 404
    assert peak() < 30


@pytest.mark.parametrize("shape", ["(10000000000000,)", "(-1,)", "(1,1,1,1,1)", "(" * 500, "()"])
def test_array_with_a_false_head_is_not_read(home: Path, shape: str) -> None:
    head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(2000) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * 8
    buffer = io.BytesIO()
    np.savez(buffer, **arrays())
    with zipfile.ZipFile(buffer, "a") as packed, pytest.warns(UserWarning, match="Duplicate name"):
        packed.writestr("ends.npy", content)
    (home / "odd" / "rollouts" / "step_1.tokens.npz").write_bytes(buffer.getvalue())
    odd_run(home)


# ---------------------------------------------------------------------- texts, names, requests


def test_note_of_a_chart_is_no_format_string(home: Path) -> None:
    for note in ("{device:>400000000}", "{device.__class__.__mro__}", "{", "{0}", "{nothing}"):
        headline = {**HEADLINE, "chart": {**HEADLINE["chart"], "note": note}}  # type: ignore[dict-item]
        (home / "odd" / "run.json").write_text(json.dumps({"headline": headline, "device_word": "x" * 9000}))
        client = client_of(home)
        page = client.get(f"/api/runs/{runs_of(client)['odd']['id']}").json()
        assert page["charts"][0]["note"] == note
    headline = {**HEADLINE, "chart": {**HEADLINE["chart"], "note": "{device}" * 10_000}}  # type: ignore[dict-item]
    (home / "odd" / "run.json").write_text(json.dumps({"headline": headline, "device_word": "x" * 9000}))
    assert len(client.get(f"/api/runs/{runs_of(client)['odd']['id']}").content) < 500_000


def test_odd_names_of_folders_are_shown(tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"a\nb", b"<img src=x>", b"{device}", b"a" * 255, b"\x1b[31mred", "\u202egnp".encode()]
    for name in names:
        path = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
        path.mkdir()
        (path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 1.0}\n')
    client = client_of(tmp_path)
    runs = runs_of(client)
    assert len(runs) == len(names)
    for run in runs.values():
        assert client.get(f"/api/runs/{run['id']}").status_code == 200


def test_many_folders_are_not_all_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.catalogue.MAX_FOLDERS", 10)
    for number in range(50):
        (tmp_path / f"{number:02d}").mkdir()
        (tmp_path / f"{number:02d}" / "run.json").write_text("{}")
    assert len(runs_of(client_of(tmp_path))) == 9


@pytest.mark.parametrize("host", ["[", "]", "[::1", "a:b:c", "", "\x7f", "localhost:99999999"])
def test_host_that_is_none_is_refused_or_served(home: Path, host: str) -> None:
    for access in (Access(None), Access(TOKEN)):
        client = client_of(home, access)
        for path in ("/api/runs", "/", "/api/runs/", "/nothing"):
            status = client.get(path, headers={"host": host}, follow_redirects=False).status_code
            assert status in (200, 307, 401, 404, 421)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"token": "\\ud800"}', 401),
        (b'{"token": ["\\ud800"]}', 401),
        (b'{"token": NaN}', 401),
        (b'{"\\ud800": 1}', 422),
        (b"[1]", 422),
        (b"", 422),
        (b"\xff", 422),
        (b"[" * 10_000, 422),
        (b'{"token": "' + b"a" * 20_000 + b'"}', 413),
    ],
)
def test_login_with_anything_but_a_token_is_refused(home: Path, body: bytes, status: int) -> None:
    assert client_of(home, Access(TOKEN)).post("/api/login", content=body).status_code == status


def test_requests_with_odd_numbers_fail_no_page(home: Path) -> None:
    client = client_of(home)
    run = runs_of(client)["odd"]["id"]
    huge = "9" * 400
    for path in (
        f"curves?key=train/reward&first={huge}&last=-{huge}",
        f"curves?key=train/reward&first=-{huge}",
        f"rollouts/train/{huge}",
        f"rollouts/train/1/{huge}",
        f"rollouts/train/1?offset={huge}&reward_min=nan&reward_max=inf",
        f"rollouts/train/search?q=%ff%00&step={huge}&index={huge}",
        f"tokens/{huge}/{huge}/{huge}",
        "rollouts/train/1?q=" + "%F0%9F%98%80" * 100,
        "curves?key=%00&points=2",
    ):
        assert client.get(f"/api/runs/{run}/{path}").status_code in (200, 404, 422), path


def test_pipe_in_one_run_does_not_hold_up_the_list(home: Path) -> None:
    """In a thread, so that a hang fails the test instead of ending the suite."""
    for name in ("metrics.jsonl", "run.json", "workers.jsonl", "findings.jsonl"):
        pipe(home / "odd" / name)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(runs_of(client_of(home))), daemon=True)
    asking.start()
    asking.join(60)
    assert found, "the list of runs hangs"
    assert found[0]["good"]["status"] == "finished"


# ---------------------------------------------------------------------- pipelines


def write_pipeline(folder: Path, **changes: Any) -> None:
    row = {
        "number": 1,
        "begun_at": "2026-11-16T08:00:00+00:00",
        "data": "d",
        "start": {"text": "base", "identity": "i"},
        "start_why": "first",
        "incumbent": None,
        **changes,
    }
    (folder / "iteration_1").mkdir(parents=True)
    (folder / "iteration_1" / "iteration.json").write_text(json.dumps({"stages": {}, **row}))


def test_odd_pipeline_leaves_the_others(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    outcome = {"digest": "d", "headline": "a secret headline"}
    record = {"stage": "train", "key": "k", "inputs": {}, "outcome": outcome, "seconds": 1.0}
    (secret / "stage.json").write_text(json.dumps({**record, "finished_at": "", "code_version": ""}))
    home = tmp_path / "results"
    write_pipeline(home / "good")
    write_pipeline(home / "broken", start=5)
    write_pipeline(home / "outside", stages={"train": {"folder": "../../secret"}})
    write_pipeline(home / "absolute", stages={"train": {"folder": str(secret)}})
    write_pipeline(home / "linked", stages={"train": {"folder": "iteration_1/train"}})
    (home / "linked" / "iteration_1" / "train").symlink_to(secret)
    write_pipeline(home / "piped")
    pipe(home / "piped" / "iteration_1" / "iteration.json")
    write_pipeline(home / "piped" / "second")
    (home / "good" / "kpi.json").symlink_to("/etc/passwd")
    client = client_of(home)
    found = {one["name"]: one for one in client.get("/api/pipelines").json()["pipelines"]}
    assert {name for name, one in found.items() if not one["problem"]} == {
        "good", "outside", "absolute", "linked", "second"
    }  # fmt: skip
    assert "iteration.json" in found["broken"]["problem"]
    for one in found.values():
        answer = client.get(f"/api/pipelines/{one['id']}")
        assert answer.status_code == 200
        assert "secret headline" not in answer.text
        assert str(tmp_path) not in answer.text
    stages = client.get(f"/api/pipelines/{found['outside']['id']}").json()["iterations"][0]["stages"]
    assert [stage["state"] for stage in stages if stage["name"] == "train"] == ["unreadable"]


def test_pipeline_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "secret", start_why="a secret reason")
    home = tmp_path / "results"
    write_pipeline(home / "mine")
    catalogue = Catalogue([LocalPlace(home)], ticks=lambda: 0.0)
    ((pipeline, place),) = catalogue.pipelines.items()
    shutil.rmtree(home / "mine")
    (home / "mine").symlink_to(tmp_path / "secret")
    assert "secret" not in json.dumps(pipeline_page(pipeline, place))
    (home / "mine").unlink()
    write_pipeline(home / "mine")
    (home / "mine" / "iteration_2").symlink_to(tmp_path / "secret" / "iteration_1")
    page = pipeline_page(pipeline, place)
    assert "secret" not in json.dumps(page)
    assert "iteration_2/iteration.json: its folder is a link" in page["problem"]


def test_what_is_gone_is_no_longer_listed(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "mine")
    write_database(tmp_path / "models" / "registry.db")
    now = [0.0]
    catalogue = Catalogue([LocalPlace(tmp_path)], registries=["http://127.0.0.1:9"], ticks=lambda: now[0])
    assert len(catalogue.pipelines) == 1
    assert len(catalogue.registries) == 2
    shutil.rmtree(tmp_path / "mine")
    shutil.rmtree(tmp_path / "models")
    now[0] = 100.0
    assert not catalogue.pipelines
    assert list(catalogue.registries.values()) == ["http://127.0.0.1:9"]


# ---------------------------------------------------------------------- registries


def write_database(path: Path, *, name: str = "maths", record: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE registered_model_tags (name, key, value)")
        database.execute("CREATE TABLE model_versions (name, version, current_stage)")
        database.execute("CREATE TABLE model_version_tags (name, version, key, value)")
        database.execute("INSERT INTO registered_model_tags VALUES (?, 'posttrain.kind', 'model')", (name,))
        database.execute("INSERT INTO model_versions VALUES (?, 1, 'None')", (name,))
        database.execute("INSERT INTO model_version_tags VALUES (?, 1, 'posttrain.record.0', ?)", (name, record))


def registry_of(home: Path) -> str | LocalPlace:
    (found,) = Catalogue([LocalPlace(home)]).registries.values()
    return found


def test_registry_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    write_database(tmp_path / "secret" / "registry.db", name="secret-model", record="[]")
    write_database(tmp_path / "results" / "mine" / "registry.db")
    found = registry_of(tmp_path / "results")
    (tmp_path / "results" / "mine" / "registry.db").unlink()
    (tmp_path / "results" / "mine" / "registry.db").symlink_to(tmp_path / "secret" / "registry.db")
    page = registry_page(found)
    assert "secret" not in json.dumps(page)
    assert page["problem"] == "registry.db: a link, which is not followed"
    (tmp_path / "results" / "mine" / "registry.db").unlink()
    assert "no registry in this folder" in registry_page(found)["problem"]


def test_registry_is_not_written(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "registry.db")) as database, database:
        database.execute("CREATE TABLE other (name)")
    before = (tmp_path / "registry.db").read_bytes()
    for registry in (registry_of(tmp_path), str(tmp_path)):
        assert "not a registry database" in registry_page(registry)["problem"]
    assert [path.name for path in tmp_path.iterdir()] == ["registry.db"]
    assert (tmp_path / "registry.db").read_bytes() == before


@pytest.mark.parametrize("record", ["{}", "[]", "nonsense", '{"files": {"a": 5}}', "\0"])
def test_odd_record_of_a_registry_is_a_sentence(tmp_path: Path, record: str) -> None:
    write_database(tmp_path / "registry.db", record=record)
    problem = registry_page(registry_of(tmp_path))["problem"]
    assert problem
    assert str(tmp_path.parent) not in problem


@pytest.mark.parametrize("value", ["zeroblob(1000000000)", "printf('%.900000c', 'x')"])
def test_registry_that_computes_its_rows_takes_bounded_memory(
    tmp_path: Path, peak: Callable[[], float], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr("posttrain.apps.ship.registry.store._MAX_READ_BYTES", 8 * 2**20)
    monkeypatch.setattr("posttrain.apps.ship.registry.store._READ_S", 0.5)
    with contextlib.closing(sqlite3.connect(tmp_path / "registry.db")) as database, database:
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        database.execute(
            f"CREATE VIEW registered_model_tags AS {endless} SELECT {value} AS name, 'posttrain.kind' AS key, "
            "'model' AS value FROM n"
        )
    peak()
    assert "registry.db: " in registry_page(registry_of(tmp_path))["problem"]
    assert peak() < 40


REGISTRIES: dict[str, Callable[[Path], Any]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": listening,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "empty": Path.touch,
    "no database": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 100),
    "a write-ahead log": lambda path: (write_database(path), damage(path, 18, b"\2\2")),
    "huge pages": lambda path: (write_database(path), damage(path, 16, b"\0\1")),
    "a hot journal": lambda path: (write_database(path), path.with_name("registry.db-journal").write_bytes(b"x")),
}


def damage(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_odd_database_is_a_sentence_and_stays(
    tmp_path: Path, kind: str, peak: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.apps.watch.shipping.READ_TRIES", 2)
    REGISTRIES[kind](tmp_path / "registry.db")
    before = {path.name: os.lstat(path).st_mtime_ns for path in tmp_path.iterdir()}
    peak()
    page = registry_page(LocalPlace(tmp_path))
    assert page["models"] == []
    assert page["problem"]
    assert peak() < 300
    assert {path.name: os.lstat(path).st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["iteration_01", "iteration_\uff11", "iteration_" + "9" * 240, "iteration_1\n"])
def test_iteration_of_an_odd_number_harms_no_other(tmp_path: Path, name: str) -> None:
    write_pipeline(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine" / "iteration_1", tmp_path / "mine" / name)
    client = client_of(tmp_path)
    (one,) = client.get("/api/pipelines").json()["pipelines"]
    page = client.get(f"/api/pipelines/{one['id']}")
    assert page.status_code == 200
    assert page.json()["problem"] == ""
    assert page.json()["iterations"]


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a\nb", b"\x1b[2J", b"x" * 255, b"<b>", b"%2e%2e", b"\xed\xa0\x80", b"-rf"]
)
def test_run_of_an_odd_name_is_listed(home: Path, name: bytes) -> None:
    (home / "odd").rename(os.path.join(home, os.fsdecode(name)))
    runs = client_of(home).get("/api/runs")
    assert runs.status_code == 200
    assert len(runs.json()["runs"]) == 2
    for run in runs.json()["runs"]:
        assert client_of(home).get(f"/api/runs/{run['id']}").status_code == 200


# ---------------------------------------------------------------------- many folders


def test_run_of_many_folders_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.catalogue.MAX_FOLDERS", 60)
    for name in ("a-run", "z-run", "group/inner/run", "a-run/earlier_001", "a-run/sub_1"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "metrics.jsonl").touch()
    for number in range(100):
        for parent in ("a-run", "a-folder", "a-folder/0", "z-run/earlier_001"):
            (tmp_path / parent / str(number)).mkdir(parents=True)
        (tmp_path / "a-folder" / f"linked-{number}").symlink_to("/nowhere")
    found = [run.name for run in Catalogue([LocalPlace(tmp_path)]).runs.values()]
    assert found == ["a-run", "a-run/earlier_001", "group/inner/run", "z-run"]


def test_folder_of_very_many_entries_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.places.MAX_ENTRIES", 10)
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert len(LocalPlace(tmp_path).names()) == 10


def test_request_does_not_wait_for_a_later_search_of_runs(home: Path) -> None:
    listing, go_on, now = threading.Event(), threading.Event(), [0.0]

    class Slow(LocalPlace):
        def names(self, folder: str = "") -> list[str]:
            if now[0]:
                listing.set()
                assert go_on.wait(60)
            return super().names(folder)

    catalogue = Catalogue([Slow(home)], ticks=lambda: now[0])
    assert len(catalogue.runs) == 2
    now[0] = 100.0
    searching = threading.Thread(target=lambda: catalogue.runs, daemon=True)
    searching.start()
    assert listing.wait(60)
    assert len(catalogue.runs) == 2
    go_on.set()
    searching.join()


# ---------------------------------------------------------------------- the doctor


def test_examination_equals_that_of_the_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60, sick=True)
    client = client_of(tmp_path)
    run = runs_of(client)["run"]["id"]
    found = client.get(f"/api/runs/{run}/doctor?again=true").json()["findings"]
    assert found == json.loads(json.dumps([one.to_json() for one in examine_folder(folder)[1]]))
    assert any(one["answers"] for one in found)


def test_large_step_is_unpacked_by_one_request_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 5):
        (tmp_path / "rollouts" / f"step_{step}.jsonl.gz").write_bytes(gzip.compress(b'{"completions":[]}\n'))
    inside, most = [0], [0]

    def counting(content: bytes) -> bytes:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return gzip.decompress(content)

    monkeypatch.setattr("posttrain.apps.watch.rollout_store.unpacked", counting)
    store = RolloutStore(LocalPlace(tmp_path), StepCache())
    threads = [threading.Thread(target=store.lines, args=("train", step)) for step in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
