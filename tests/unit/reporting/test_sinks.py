"""TensorBoard and MLflow through their own clients. The others, and a run that is really killed:
integration/test_trackers.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tracker_readers

from posttrain.config import LoggerConfig
from posttrain.reporting.doctor.findings import Finding
from posttrain.reporting.loggers import make_sink, recorded_run
from posttrain.reporting.loggers.follower import Follower
from posttrain.reporting.loggers.sink import LoggerProblem
from posttrain.reporting.loggers.wandb import WandbSink
from posttrain.reporting.run_files import append_rows


def follow(folder: Path, tool: str, config: LoggerConfig) -> None:
    """As one process of a run that is killed afterwards: nothing is closed."""
    follower = Follower(tool, lambda: make_sink(tool, config), recorded_run(folder))
    assert follower.deliver(), follower.problem


def resumed(folder: Path, last_step: int) -> None:
    """Rows after the checkpoint are cut, and trained again with other times."""
    rows = [
        {"step": step, "train/reward": step / 7, "timing/train/total_step_time": 1.0} for step in range(last_step + 1)
    ]
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    append_rows(folder / "metrics.jsonl", rows)


def train(folder: Path, *steps: int, seconds: float) -> None:
    rows = [{"step": step, "train/reward": step / 7, "timing/train/total_step_time": seconds} for step in steps]
    append_rows(folder / "metrics.jsonl", rows)


def test_tensorboard_is_filled_anew_at_every_start(tmp_path: Path) -> None:
    config = LoggerConfig()
    train(tmp_path, 0, 1, 2, 3, seconds=1.0)
    finding = Finding(3, "kl-runaway", "error", "train/kl", 1.0, "it runs away", ("lr=1e-6",), "seed")
    append_rows(tmp_path / "findings.jsonl", [finding.to_json()])
    follow(tmp_path, "tensorboard", config)
    resumed(tmp_path, 1)
    train(tmp_path, 2, 3, 4, seconds=2.0)
    follow(tmp_path, "tensorboard", config)
    found = tracker_readers.tensorboard(tmp_path)
    assert {step: values["train/reward"] for step, values in found.items()} == {
        step: [pytest.approx(step / 7)] for step in range(5)
    }
    assert found[3]["timing/train/total_step_time"] == [2.0]  # of the row that counts

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "loggers" / "tensorboard"))
    events.Reload()
    (told,) = events.Tensors("doctor/kl-runaway")
    assert b"it runs away" in told.tensor_proto.string_val[0]


def test_mlflow_gets_each_step_once_over_kills_and_a_new_run_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its files of artifacts
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = LoggerConfig.model_validate({"mlflow": {"tracking_uri": uri, "run_name": "mine"}})
    (tmp_path / "config.yaml").write_text("policy: {precision: float32}\n")
    train(tmp_path, 0, 1, 2, 3, seconds=1.0)
    follow(tmp_path, "mlflow", config)
    resumed(tmp_path, 1)
    train(tmp_path, 2, 3, 4, 5, seconds=2.0)
    follow(tmp_path, "mlflow", config)
    found = tracker_readers.mlflow(uri)
    assert {step: values["train/reward"] for step, values in found.items()} == {step: [step / 7] for step in range(6)}
    assert found[3]["timing/train/total_step_time"] == [1.0]  # it keeps what it got
    assert found[5]["timing/train/total_step_time"] == [2.0]

    (tmp_path / "run.json").write_text('{"record_id": "another"}')  # after --restart, for example
    follow(tmp_path, "mlflow", config)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("posttrain").experiment_id])
    assert [run.data.metrics["step"] for run in runs] == [5.0, 5.0]
    assert all(run.data.params["policy.precision"] == "float32" and run.info.run_name == "mine" for run in runs)


def test_what_a_tracker_needs_and_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(LoggerProblem, match=r"set logger\.mlflow\.tracking_uri"):
        make_sink("mlflow", LoggerConfig()).open(recorded_run(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", object())
    with pytest.raises(LoggerProblem, match="there is no API key"):
        WandbSink(LoggerConfig().wandb).open(recorded_run(tmp_path))
