"""The run folder survives a kill at any byte, and a second run in it loses nothing of the first."""

from __future__ import annotations

import gzip
import json
import os
import threading
from typing import Any

import pytest

from posttrain.config.changes import ConfigChange
from posttrain.reporting.doctor import Finding
from posttrain.reporting.examination import examine_folder
from posttrain.reporting.run_data import groups_of
from posttrain.reporting.run_files import append_rows, complete_row, open_run, parse_lines, read_rows
from posttrain.reporting.wording import short_model_name
from posttrain.types import Score

FILES = ("metrics.jsonl", "config.yaml", "run.json", "report.html", "workers.jsonl")


def test_file_torn_at_any_byte_is_repaired_to_its_complete_rows(tmp_path: Any) -> None:
    rows = [{"step": step, "train/loss": step / 7} for step in (1, 2, 3)]
    append_rows(tmp_path / "metrics.jsonl", rows)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for size in range(len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:size])
        open_run(tmp_path, resumed_step=3)
        # A row is complete with its closing brace; only its line end may be missing, and is then added.
        num_complete = whole[:size].count(b"}")
        assert read_rows(tmp_path / "metrics.jsonl") == rows[:num_complete]
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:num_complete])


def test_row_appended_after_a_repair_is_readable(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "train/lo')
    notes, _ = open_run(tmp_path, resumed_step=1)
    append_rows(path, [{"step": 2}])
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    assert any("line 2 was torn" in note for note in notes)


def test_rows_after_the_resumed_step_are_removed_and_others_keep_their_bytes(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step":1,  "train/loss": 0.30000000000000004}\n'
    path.write_bytes(kept + b'{"step": 2}\n{"step": 3}\n')
    notes, _ = open_run(tmp_path, resumed_step=1)
    assert path.read_bytes() == kept
    assert any("2 rows after step 1 are removed" in note for note in notes)


def test_gap_between_rows_and_checkpoint_is_reported(tmp_path: Any) -> None:
    append_rows(tmp_path / "metrics.jsonl", [{"step": 1}])
    assert open_run(tmp_path, 4) == ([], ["metrics.jsonl ends at step 1 although the run resumes at step 4"])


@pytest.mark.parametrize(
    ("resumed_step", "kept"), [(0, set()), (9, set()), (10, {"validation"}), (11, {"generation"}), (12, set())]
)
def test_journals_of_agents_are_kept_for_the_weights_of_the_checkpoint_only(
    resumed_step: int, kept: set[str], tmp_path: Any
) -> None:
    folder = tmp_path / "agent_calls"
    folder.mkdir()
    (folder / "torn.jsonl").write_bytes(b'{"identity": "x", "st')
    (folder / "generation.jsonl").write_text('{"identity": "x", "step": 12}\n{"batch": []}\n')
    (folder / "validation.jsonl").write_text('{"identity": "x", "step": 10}\n{"batch": []}\n')
    open_run(tmp_path, resumed_step)
    assert {path.stem for path in folder.iterdir()} == kept


def test_missing_rows_are_reported(tmp_path: Any) -> None:
    assert open_run(tmp_path, 4) == ([], ["metrics.jsonl is missing: the rows of the steps up to 4 are lost"])
    assert open_run(tmp_path, 0) == ([], [])


def test_only_objects_with_a_step_are_rows(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[1]\n{"loss": 1}\n{"step": "2"}\nnull\n{"step": 3}\n')
    assert [row for _, row in parse_lines(path)] == [None, None, None, None, {"step": 3}]


def test_resuming_removes_rollouts_of_later_steps_and_temporary_files(bench: Any, group: Any, report: Any) -> None:
    recorder = bench.recorder()
    for step in (1, 2, 3):
        recorder.record_step(step, report(step, groups=(group(step),)), report(step, groups=(group(step),)))
    rollouts = bench.folder / "rollouts"
    (rollouts / "step_4.jsonl.gz.partial").write_bytes(b"half")
    (bench.folder / "report.html.partial").write_bytes(b"half")
    bench.recorder(resumed_step=2)
    assert {path.name for path in rollouts.iterdir()} == {
        f"{prefix}step_{step}.jsonl.gz" for prefix in ("", "validation_") for step in (1, 2)
    }
    assert not list(bench.folder.glob("*.partial"))


def test_fresh_run_archives_an_earlier_one_and_reports_it(bench: Any, group: Any, report: Any) -> None:
    for _ in range(3):
        recorder = bench.recorder()
        recorder.record_step(1, report(groups=(group(),)), None)
        recorder.finish("done")
    assert sorted(path.name for path in bench.folder.glob("earlier_*")) == ["earlier_001", "earlier_002"]
    for earlier in bench.folder.glob("earlier_*"):
        assert {path.name for path in earlier.iterdir()} == {*FILES, "logs", "rollouts"}
        assert (earlier / "rollouts" / "step_1.jsonl.gz").exists()
    assert len(bench.rows()) == 1
    assert "its files are now in earlier_002/" in bench.output


def test_interrupted_archiving_is_finished_in_the_same_folder(bench: Any, report: Any) -> None:
    bench.recorder().record_step(1, report(), None)
    (bench.folder / "earlier_001").mkdir()
    (bench.folder / "run.json").rename(bench.folder / "earlier_001" / "run.json")  # killed after the first file
    bench.recorder()
    assert {path.name for path in (bench.folder / "earlier_001").iterdir()} == {*FILES, "logs"}
    assert not (bench.folder / "earlier_002").exists()


def changes_since(old: str) -> list[ConfigChange]:
    return [] if old == "lr: 2\n" else [ConfigChange("lr", old[4:-1], "2", is_training=True)]


def test_changed_config_is_written_beside_the_first_one_and_recorded(bench: Any, report: Any) -> None:
    bench.recorder(config_yaml="lr: 1\n").record_step(1, report(), None)
    bench.recorder(resumed_step=1, config_yaml="lr: 1\n")
    assert not list(bench.folder.glob("config_*"))
    for _ in range(2):  # the second one is resumed before it has saved a checkpoint
        bench.recorder(resumed_step=1, config_yaml="lr: 2\n", changes_since=changes_since)
        assert (bench.folder / "config.yaml").read_text() == "lr: 1\n"
        assert (bench.folder / "config_from_step_2.yaml").read_text() == "lr: 2\n"
        info = json.loads((bench.folder / "run.json").read_text())
        assert info["config_changes"] == [{"from_step": 2, "key": "lr", "old": "1", "new": "2"}]


def test_changed_config_of_removed_steps_is_removed(bench: Any, report: Any) -> None:
    bench.recorder(config_yaml="lr: 1\n").record_step(1, report(), None)
    bench.recorder(resumed_step=1, config_yaml="lr: 2\n", changes_since=changes_since).record_step(2, report(), None)
    bench.recorder(resumed_step=1, config_yaml="lr: 1\n")
    assert not list(bench.folder.glob("config_from*"))
    assert json.loads((bench.folder / "run.json").read_text())["config_changes"] == []


def test_complete_run_is_not_written_to(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=1)
    recorder.record_step(1, report(), None)
    recorder.finish("finished")
    before = {path.name: path.read_bytes() for path in bench.folder.iterdir() if path.is_file()}
    for max_steps in (1, 0):
        again = bench.recorder(resumed_step=1, max_steps=max_steps, config_yaml="another: 1\n")
        again.finish("nothing to do")
        assert {path.name: path.read_bytes() for path in bench.folder.iterdir() if path.is_file()} == before
    assert "nothing to do" in bench.output


def test_run_killed_after_its_last_step_is_completed(bench: Any, report: Any) -> None:
    bench.recorder(max_steps=1).record_step(1, report(), None)
    bench.recorder(resumed_step=1, max_steps=1).finish("nothing to do")
    assert json.loads((bench.folder / "run.json").read_text())["status"] == "finished"


def test_run_killed_before_its_last_report_gets_it(bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = bench.recorder(max_steps=1)
    recorder.record_step(1, report(), None)

    def killed(*_: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr("posttrain.reporting.recorder.write_report", killed)
        with pytest.raises(SystemExit):
            recorder.finish("finished")
    (bench.folder / "report.html").unlink(missing_ok=True)
    bench.recorder(resumed_step=1, max_steps=1).finish("nothing to do")
    page = (bench.folder / "report.html").read_text()
    assert 'class="status finished"' in page
    assert "1 / 1" in page


def test_complete_run_is_shown_with_what_the_doctor_found(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=1)
    recorder.record_step(1, report(), None)
    recorder.finish("finished")
    finding = Finding(1, "kl-runaway", "error", "train/kl_penalty", 6.8, "the policy is leaving", ("lr=1e-6",), "guide")
    append_rows(bench.folder / "findings.jsonl", [finding.to_json()])
    bench.recorder(resumed_step=1, max_steps=1).finish("nothing to do")
    assert "1 error" in bench.output.rpartition("nothing to do")[2]


def test_equal_groups_give_equal_bytes(tmp_path: Any, bench: Any, group: Any, report: Any) -> None:
    recorder = bench.recorder()
    recorder.record_step(1, report(groups=(group(),)), None)
    recorder.record_step(2, report(groups=(group(),)), None)
    one, two = (bench.folder / "rollouts" / f"step_{step}.jsonl.gz" for step in (1, 2))
    assert one.read_bytes() == two.read_bytes()


def test_rollout_row_has_the_group(bench: Any, group: Any, report: Any) -> None:
    scores = (Score(1.0, {"correct": 1.0}), Score(None, error="timeout after 5 s"))
    one = group(7, texts=("ja \ud800 ü\u2028", ""), scores=scores, advantages=(0.5, float("nan")))
    bench.recorder().record_step(1, report(groups=(one, group(8))), None)
    with gzip.open(bench.folder / "rollouts" / "step_1.jsonl.gz", "rb") as lines:
        first, second = (json.loads(line) for line in lines)
    assert first == {
        "draw": 7,
        "id": "sums:7",
        "prompt": "2 + 2 = ",
        "reference": "4",
        "completions": [
            {
                "text": "ja \ud800 ü\u2028",
                "reward": 1.0,
                "parts": {"correct": 1.0},
                "advantage": 0.5,
                "error": None,
                "finish_reason": "stop",
                "num_tokens": 8,
                "versions": [],
            },
            {
                "text": "",
                "reward": None,
                "parts": {},
                "advantage": None,
                "error": "timeout after 5 s",
                "finish_reason": "stop",
                "num_tokens": 1,
                "versions": [],
            },
        ],
    }
    assert second["draw"] == 8


def test_non_finite_numbers_cannot_reach_a_file(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_rows(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": float("nan")}])
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"config_changes": 5}',
        '{"config_changes": [5, {"from_step": "x"}]}',
        '{"warnings": [{"step": 1}], "wall_s": "x"}',
        "[]",
        "[" * 200_000,
        '{"resumed_at_steps": {"a": 1}, "started_at": 5, "max_steps": "x", "headline": []}',
        "",
    ],
)
def test_a_damaged_run_file_does_not_keep_a_run_from_going_on(content: str, bench: Any, report: Any) -> None:
    bench.recorder(config_yaml="lr: 1\n").record_step(1, report(), None)
    (bench.folder / "run.json").write_text(content)
    again = bench.recorder(resumed_step=1, config_yaml="lr: 1\n", max_steps=2)
    again.record_step(2, report(), None)
    again.finish("finished")
    assert json.loads((bench.folder / "run.json").read_text())["status"] == "finished"
    if not content.startswith("{"):
        assert "run.json is damaged" in bench.output


def test_a_later_validation_completes_the_row_of_its_step(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    complete_row(path, {"step": 0, "validation/accuracy": 0.1})
    append_rows(path, [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.5}])
    for _ in range(2):  # a run that is stopped again validates again
        complete_row(path, {"step": 2, "validation/accuracy": 0.25})
    assert read_rows(path) == [
        {"step": 0, "validation/accuracy": 0.1},
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5, "validation/accuracy": 0.25},
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "findings.jsonl", "unscored.jsonl", "config.yaml"])
def test_named_pipe_in_a_run_folder_is_refused_without_waiting(tmp_path: Any, name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    found: list[str] = []

    def look() -> None:
        try:
            examine_folder(tmp_path)
        except OSError as error:
            found.append(f"{error.filename}: {error.strerror}")

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(60)
    assert found == [f"{tmp_path / name}: a named pipe, not a file"]


def test_answers_of_a_report_take_bounded_memory(tmp_path: Any, monkeypatch: Any) -> None:
    file = tmp_path / "step_1.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"completions": []}\n' * 100))
    assert len(groups_of(file)) == 100
    monkeypatch.setattr("posttrain.reporting.run_data.MAX_ROLLOUT_BYTES", 10 * (20 + 2 * 100) + 1)
    assert len(groups_of(file)) == 10
    file.write_bytes(gzip.compress(b'{"completions": [' + b"[]," * 1000 + b"[]]}\n"))
    assert groups_of(file) == []
    file.write_bytes(gzip.compress(b"5\n[]\n"))
    assert groups_of(file) == []
    file.unlink()
    os.mkfifo(file)
    assert groups_of(file) == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/shared/results/demo/taught/step_200/policy/weights/model", "taught/step_200"),
        ("/shared/models/mine", "models/mine"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("tiny", "tiny"),
    ],
)
def test_titles_name_a_model_in_short(model: str, expected: str) -> None:
    assert short_model_name(model) == expected
