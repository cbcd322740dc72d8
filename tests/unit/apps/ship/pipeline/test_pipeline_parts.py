"""The lock, the picture and the names of files: parts that a whole run shows only from one side."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from posttrain.apps.demo.arithmetic import labelled_traces
from posttrain.apps.ship.pipeline.kpi import KpiRow
from posttrain.apps.ship.pipeline.page import HEADINGS, cells, kpi_svg
from posttrain.apps.ship.pipeline.records import Iteration, ModelChoice, StageMark, StageOutcome, StageRecord
from posttrain.apps.ship.pipeline.runner import only_runner
from posttrain.apps.ship.pipeline.stages import train
from posttrain.apps.ship.pipeline.stages.train import choose_checkpoint
from posttrain.apps.ship.pipeline.training_process import run_training
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace
from posttrain.apps.watch.shipping import pipeline_page
from posttrain.checkpointing import CheckpointStore
from posttrain.config import load_config
from posttrain.config.named_files import files_named_in
from posttrain.errors import InputError

HOLDS_AND_WAITS = """
import os, subprocess, sys
from pathlib import Path
from posttrain.apps.ship.pipeline.runner import only_runner
with only_runner(Path(sys.argv[1]), print) as lock:
    sleep = "import time; time.sleep(float(%r))" % sys.argv[2]
    child = subprocess.Popen([sys.executable, "-c", sleep], pass_fds=(lock,))
    print(child.pid, flush=True)
    if sys.argv[3] == "die":
        os._exit(1)
    sys.stdin.read()
"""


def holder(home: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_AND_WAITS, str(home), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_a_second_run_of_the_same_pipeline_is_refused(tmp_path: Path) -> None:
    first = holder(tmp_path / "home", "0", "stay")
    try:
        words = f"another process is running this pipeline \\(process {first.pid} on"
        with pytest.raises(InputError, match=words), only_runner(tmp_path / "home", lambda line: None):
            pass
    finally:
        first.communicate("")
    with only_runner(tmp_path / "home", lambda line: None):
        pass


def test_run_waits_for_the_training_of_a_killed_pipeline(tmp_path: Path) -> None:
    holder(tmp_path / "home", "0.6", "die").wait()
    said: list[str] = []
    with only_runner(tmp_path / "home", said.append):
        pass
    assert said == ["the run before was killed and its training is still saving; waiting for it"]


def test_a_file_system_without_flock_is_named_with_the_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    words = r"pipeline.folder: .*/home/.lock: its file system has no flock: .*mount it with locks"
    with pytest.raises(InputError, match=words), only_runner(tmp_path / "home", lambda line: None):
        pass


def test_the_exit_code_of_a_training_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("dpo: {max_num_stepz: 3}\n")
    assert run_training("dpo", config, quiet=True, lock=None) == 64
    assert "did you mean `dpo.max_num_steps`" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ended_with", "code", "words"),
    [
        (65, 65, "no rollout could be scored"),
        (75, 75, "another process is training in this folder"),
        (76, 76, "another process is training in this folder"),
        (85, 85, "stopped, saved"),
        (143, 85, "before there was anything to save"),
        (129, 85, "before there was anything to save"),
        (74, 74, "the storage failed"),
        (64, 64, "refused its input"),
        (1, 1, "crashed"),
        (-9, 1, "killed by signal 9"),
    ],
)
def test_training_that_did_not_succeed_stops_the_pipeline_with_the_reason(
    ended_with: int, code: int, words: str
) -> None:
    found, message = train._ended(ended_with, "grpo")
    assert found == code
    assert words in message


@pytest.mark.parametrize(
    ("which", "higher_is_better", "step"), [("newest", True, 6), ("best", True, 4), ("best", False, 2)]
)
def test_newest_or_best_checkpoint_is_used(tmp_path: Path, which: str, higher_is_better: bool, step: int) -> None:
    overrides = ["checkpointing.metric_name=val:accuracy", f"checkpointing.higher_is_better={higher_is_better}"]
    store = CheckpointStore(tmp_path, save_period=2, say=lambda line: None)
    for number, accuracy in ((2, 0.1), (4, 0.9), (6, 0.5)):
        with store.writing(number) as folder:
            store.save_info(folder, {"val:accuracy": accuracy})
    loaded = load_config("dpo", None, ["policy.model_name=x", *overrides])
    assert choose_checkpoint(tmp_path, loaded, which) == tmp_path / f"step_{step}"
    unknown = load_config("dpo", None, ["policy.model_name=x", "checkpointing.metric_name=val:other"])
    if which == "best":
        with pytest.raises(InputError, match=r"no checkpoint .* has the metric val:other"):
            choose_checkpoint(tmp_path, unknown, which)


def test_more_demo_prompts_do_not_change_other_traces() -> None:
    few, many = (list(labelled_traces(seed=1, num_prompts=count, answers_per_prompt=8)) for count in (20, 30))
    assert many[: len(few)] == few
    assert len(many) == 30 * 8
    assert {row["final_reward"] for row in many} == {0.0, 1.0}
    assert all((row["reference"] in row["output"]) >= row["final_reward"] for row in many)


def row(iteration: int, **known: object) -> KpiRow:
    empty = dict.fromkeys(
        ("dataset", "training_metric", "training_value", "score_metric", "score", "score_low", "score_high")
    )
    empty |= dict.fromkeys(("traces_reward", "incumbent_score", "verdict", "version", "stage", "cost"))
    empty |= dict.fromkeys(("predicted", "not_predicted", "actual"))
    facts = {"begun_at": "", "finished": True, "start": "base", "seconds": 60.0, "device_hours": 0.01}
    return KpiRow(iteration=iteration, **{**empty, **facts, **known})  # type: ignore[arg-type]


def test_picture_shows_every_iteration_with_missing_values() -> None:
    assert "no iteration yet" in kpi_svg("x", [])
    rows = [
        row(1, score=0.4, score_low=0.3, score_high=0.5, score_metric="pass@1", verdict="reject", incumbent_score=0.2),
        row(2),
        row(3, score=0.6, score_low=0.5, score_high=0.7, score_metric="pass@1", verdict="promote", cost=2.0),
    ]
    drawing = ElementTree.fromstring(kpi_svg("a <b>", rows))
    space = "{http://www.w3.org/2000/svg}"
    assert [dot.get("class") for dot in drawing.iter(f"{space}circle")] == ["bad", "good"]
    assert len(list(drawing.iter(f"{space}rect"))) == 1 + 1 + 3, "the page, one cost, three times"
    words = " ".join(text.text or "" for text in drawing.iter(f"{space}text"))
    assert "a <b>: KPI over iterations" in words
    assert "held-out pass@1" in words


def test_contents_of_data_and_model_folders_count(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_9"
    for name in ("data/a.jsonl", "data/more/b.jsonl", "data/.hidden", "step_9/policy/weights/w", "step_9/optimizer/o"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    data = [tmp_path / "data/a.jsonl", tmp_path / "data/more/b.jsonl"]
    assert files_named_in({"main.data.dataset_name": str(tmp_path / "data")}) == data
    assert files_named_in({"data": {"train": [{"data_path": f"{tmp_path}/data/*.jsonl"}]}}) == data[:1]
    assert files_named_in({"judge.model_name": str(checkpoint)}) == [checkpoint / "policy/weights/w"]
    assert files_named_in({"data.split": str(tmp_path / "data")}) == [], "any word may be the name of a folder"


def test_files_that_settings_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    (tmp_path / "data.jsonl").write_text("")
    values = {
        "env.mine.function": f"{tmp_path}/rewards.py:score",
        "data.validation": [{"data_path": f"{tmp_path}/data.jsonl"}],
        "policy.model_name": str(tmp_path),
        "policy.precision": "float32",
    }
    assert files_named_in(values) == [tmp_path / "rewards.py", tmp_path / "data.jsonl"]
    assert files_named_in({"prompt": "Judge this. " * 40}) == [], "longer than a file name can be"


def test_page_shows_the_old_verdict_and_the_current_stage() -> None:
    verdict, version = HEADINGS.index("verdict"), HEADINGS.index("version, now")
    back = cells(row(1, verdict="promote", version=1, stage="archived"))
    assert (back[verdict], back[version]) == ("promoted", "1, archived")
    assert cells(row(2, verdict="promote", version=2))[version] == "2, stage unknown"
    assert cells(row(3))[version] == "–"


def test_stages_are_shown_with_their_state(tmp_path: Path) -> None:
    home = tmp_path / "flywheel"
    stage = home / "iteration_1" / "traces-abc"
    stage.mkdir(parents=True)
    outcome = StageOutcome("d", "1,000 traces")
    StageRecord("traces", "abc", {}, outcome, 2.5, "2026-11-16T08:00:00+00:00", "1", stage).write()
    marks = {"traces": StageMark(folder="iteration_1/traces-abc"), "convert": StageMark(skipped="nothing to do")}
    start = ModelChoice("base", "id")
    Iteration(
        1, stage.parent, "2026-11-16T08:00:00+00:00", "data", start, "first", None, running="train", stages=marks
    ).write()
    (home / "kpi.json").write_text(json.dumps([{"iteration": 1, "score": None}]))
    ((pipeline_id, found),) = Catalogue([LocalPlace(tmp_path)]).pipelines.items()
    page = pipeline_page(pipeline_id, found)
    (iteration,) = page["iterations"]
    states = {one["name"]: (one["state"], one["headline"]) for one in iteration["stages"]}
    assert states["traces"] == ("done", "1,000 traces")
    assert states["train"] == ("running", "")
    assert states["convert"] == ("skipped", "nothing to do")
    assert states["canary"] == ("waiting", "")
    assert page["kpi"] == [{"iteration": 1, "score": None}]
