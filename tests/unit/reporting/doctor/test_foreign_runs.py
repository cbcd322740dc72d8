"""Runs of other systems in their own formats; tests/foreign_runs/README.md says what is recorded and what is made
up."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from made_runs import make_run, write_groups
from pyarrow import parquet

from posttrain.apps.watch import foreign
from posttrain.apps.watch.foreign import open_foreign_run, scalars
from posttrain.cli.main import main

SAMPLES = Path(__file__).parents[3] / "foreign_runs"
EVENTS = SAMPLES / "nemo_rl" / "exp_001" / "tensorboard" / "events.out.tfevents.1700000000.host.1.0"


def findings_of(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["doctor", str(SAMPLES / name), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_trl(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = findings_of("trl", capsys)
    assert (code, report["system"], report["kind"], report["steps"]) == (3, "TRL", "grpo", 12)
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert found["truncated"]["severity"] == "error"
    assert found["truncated"]["fixes"][0] == "max_completion_length=32"
    assert found["kl-runaway"]["severity"] == "error"
    assert found["kl-runaway"]["fixes"][0].startswith("learning_rate=")
    run = open_foreign_run(SAMPLES / "trl")
    assert run is not None
    assert {"train/reward", "train/approx_entropy", "train/grad_norm", "train/lr"} <= set(run.rows[0])
    groups = run.groups(5)
    assert [len(group["completions"]) for group in groups] == [4, 4]
    assert all(answer["reward"] is not None for group in groups for answer in group["completions"])


def test_nemo_rl(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = findings_of("nemo_rl", capsys)
    assert (code, report["system"], report["steps"]) == (3, "NeMo RL", 30)
    (kl,) = report["findings"]
    assert (kl["rule"], kl["severity"]) == ("kl-runaway", "error")
    assert "loss_fn.reference_policy_kl_penalty=five times as much" in kl["fixes"]
    run = open_foreign_run(SAMPLES / "nemo_rl")
    assert run is not None
    assert run.rows[0]["train/mean_generation_length"] == 211.0
    assert run.groups(21)[0]["completions"][1] == {"text": "It is 1. \\boxed{1}", "reward": 1.0}


def test_verl(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = findings_of("verl", capsys)
    assert (code, report["system"], report["steps"]) == (3, "verl", 20)
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert found["truncated"]["fixes"][0] == "actor_rollout_ref.actor.optim.lr=1e-7"
    assert found["truncated"]["step"] == 12
    assert len(found["length-explosion"]["answers"]) == 3


def test_prime_rl(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = findings_of("prime_rl", capsys)
    assert (code, report["system"]) == (3, "prime-rl")
    (entropy,) = report["findings"]
    assert (entropy["rule"], entropy["severity"]) == ("entropy-collapse", "error")
    assert entropy["fixes"][0] == "trainer.optim.lr=1e-7"


def test_scalars_of_an_event_file_as_tensorboard_wrote_it() -> None:
    found = list(scalars(EVENTS))
    assert found[0] == (1, "train/loss", pytest.approx(0.01))
    assert [step for step, tag, _ in found if tag == "validation/accuracy"] == [10, 20, 30]


def test_a_torn_record_ends_an_event_file(tmp_path: Path) -> None:
    content, whole = EVENTS.read_bytes(), list(scalars(EVENTS))
    for cut in (1, 5, 30):
        (tmp_path / "events").write_bytes(content[:-cut])
        assert list(scalars(tmp_path / "events")) == whole[:-1]


def test_missing_tensorboard_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tensorboard.backend.event_processing.event_file_loader", "tensorboard.util.tensor_util"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["doctor", str(SAMPLES / "nemo_rl")]) == 64
    assert "posttrain[tensorboard]" in capsys.readouterr().err


def test_a_folder_without_a_run_names_what_is_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 64
    assert "trainer_state.json" in capsys.readouterr().err
    assert main(["doctor", str(SAMPLES.with_name("foreign_run"))]) == 64
    assert "did you mean" in capsys.readouterr().err


@pytest.fixture
def copy(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return shutil.copytree(SAMPLES / request.param, tmp_path / "run")


@pytest.mark.parametrize("copy", ["trl"], indirect=True)
def test_folders_beside_the_checkpoints_of_trl_are_ignored(copy: Path) -> None:
    (copy / "checkpoint-best").mkdir()
    assert main(["doctor", str(copy)]) == 3


@pytest.mark.parametrize(
    ("copy", "file"),
    [
        ("trl", "checkpoint-12/trainer_state.json"),
        ("verl", "metrics.jsonl"),
        ("nemo_rl", str(EVENTS.relative_to(SAMPLES / "nemo_rl"))),
        ("prime_rl", "trainer/metrics.jsonl"),
    ],
    indirect=["copy"],
)
@pytest.mark.parametrize("damage", ["torn", "deep", "endless", "link"])
def test_odd_metrics_are_refused_or_left_out(
    copy: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "MAX_FILE_BYTES", 2**20)
    path = copy / file
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        path.symlink_to(path)
    else:
        path.write_bytes({"torn": content[:-9], "deep": b"[" * 10_000, "endless": b'{"a": ' * 10**6}[damage])
    assert main(["doctor", str(copy)]) in (0, 3, 64)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("copy", ["verl"], indirect=True)
def test_a_metric_that_is_text_counts_as_not_logged(copy: Path) -> None:
    odd = {"val-core/math/mean@4": "high", "critic/score/mean": 10**400, "step": "two"}
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 21, "data": odd | {"actor/lr": 1.0}}) + "\n")
    run = open_foreign_run(copy)
    assert run is not None
    assert run.rows[-1] == {"step": 21, "train/lr": 1.0}


@pytest.mark.parametrize("copy", ["trl"], indirect=True)
@pytest.mark.parametrize("damage", ["torn", "columns"])
def test_answers_that_cannot_be_read_are_not_shown(copy: Path, damage: str) -> None:
    path = copy / "completions" / "completions_00005.parquet"
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        parquet.write_table(pa.table({"prompt": ["p"], "text": ["t"]}), path)
    assert main(["doctor", str(copy)]) == 3
    run = open_foreign_run(copy)
    assert run is not None
    assert [[one["reward"] for one in group["completions"]] for group in run.groups(5)] == (
        [] if damage == "torn" else [[None]]
    )


def test_answers_of_our_own_run_with_values_that_are_no_numbers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=40, sick=True)
    code = main(["doctor", str(folder), "--json"])
    finding = next(one for one in json.loads(capsys.readouterr().out)["findings"] if one["answers"])
    write_groups(folder, finding["step"], [{"id": 1, "completions": [{"text": "a", "reward": "b", "num_tokens": []}]}])
    assert main(["doctor", str(folder), "--json"]) == code
    again = next(one for one in json.loads(capsys.readouterr().out)["findings"] if one["rule"] == finding["rule"])
    assert again["answers"] == []
