"""Real clients of trackers: a run that is killed twice, with a tracker down in between, has every step in every tracker
once.

The clients of W&B, Trackio and SwanLab, and MLflow's server, are large: `make test-loggers` installs them and runs this
file. `unit/reporting/test_sinks.py` tests what the others install anyway.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_runs
import tracker_readers

from posttrain.cli.main import main

STEPS = 40
# So slow that trackers are reached, or found to be down, while the run goes on.
SLOW_REWARD = """
import time

def odd(prompt, response, reference):
    time.sleep(0.05)
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""
TOOLS = ("tensorboard", "wandb", "trackio", "swanlab")
# huey: mlflow-skinny, which the registry needs, has no server
MISSING = [name for name in (*TOOLS, "mlflow", "huey") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make test-loggers installs them"),
]


class Tracked(NamedTuple):
    folder: Path
    output: str
    mlflow_uri: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    """Killed after some steps, killed again while the server of MLflow was down, then finished."""
    base = tmp_path_factory.mktemp("tracked")
    os.environ["TRACKIO_DIR"] = str(base / "trackio")
    server = tracker_readers.MlflowServer(base)
    folder = base / "run"
    settings = [f"logger.{tool}_enabled=true" for tool in TOOLS] + ["logger.mlflow_enabled=true"]
    settings += [f"logger.mlflow.tracking_uri={server.uri}", "logger.wandb.mode=offline", "logger.swanlab.mode=offline"]
    model, data = tiny_runs.save_model(base / "model"), tiny_runs.save_data(base / "data")
    (data / "rewards.py").write_text(SLOW_REWARD)
    command = tiny_runs.command([*tiny_runs.grpo(model, data, folder, steps=STEPS), *settings, "--quiet"])
    output = b""

    def start(until_rows: int | None, until_said: str = "") -> None:
        nonlocal output
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=base)
        if until_rows is not None:
            log = folder / "logs" / "train.log"
            while process.poll() is None and (
                tiny_runs.count_rows(folder) < until_rows or until_said not in log.read_text()
            ):
                time.sleep(0.05)
            assert process.poll() is None, process.stdout and process.stdout.read().decode()
            process.send_signal(signal.SIGKILL)
        output += process.communicate(timeout=600)[0]
        assert until_rows is not None or process.returncode == 0, output.decode()[-3000:]

    try:
        server.start()
        start(until_rows=4)
        server.stop()
        start(until_rows=9, until_said="logger mlflow: ")
        server.start()
        start(until_rows=None)
        yield Tracked(folder, output.decode(), server.uri)
    finally:
        server.stop()


def compare(found: tracker_readers.Values, folder: Path, *, is_filled_anew: bool, as_float32: bool = False) -> None:
    """Every step once, with the values of metrics.jsonl. A tracker that keeps what it got has other times of steps that
    were trained again: all else is equal.
    """
    rows = tiny_runs.rows_of(folder)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert sorted(found) == [row["step"] for row in rows]
    for row in rows:
        for key, value in row.items():
            if key == "step" or value is None:
                continue
            assert len(found[row["step"]][key]) == 1, (row["step"], key, found[row["step"]][key])
            is_time = key.startswith(("timing/", "performance/"))
            if is_filled_anew or not is_time:
                expected = float(np.float32(value)) if as_float32 else value
                assert found[row["step"]][key] == [expected], (row["step"], key)


def test_tensorboard_has_every_step_once(run: Tracked) -> None:
    found = tracker_readers.tensorboard(run.folder)
    compare(found, run.folder, is_filled_anew=True, as_float32=True)


def test_wandb_has_every_step_once(run: Tracked) -> None:
    compare(tracker_readers.wandb(run.folder), run.folder, is_filled_anew=True)


def test_mlflow_has_every_step_once(run: Tracked) -> None:
    found = tracker_readers.mlflow(run.mlflow_uri)
    compare(found, run.folder, is_filled_anew=False)


def test_an_outage_is_said_and_the_run_goes_on(run: Tracked) -> None:
    assert re.search(r"warning: logger mlflow: .*; the run continues", run.output)
    assert run.output.count("logger mlflow:") == 1


def test_trackio_has_every_step_once(run: Tracked) -> None:
    compare(tracker_readers.trackio(), run.folder, is_filled_anew=False)


def test_swanlab_has_every_step_once(run: Tracked) -> None:
    compare(tracker_readers.swanlab(run.folder), run.folder, is_filled_anew=True)


def test_a_run_without_trackers_is_sent_later(run: Tracked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Backfill into another database, twice: the second time there is nothing to send."""
    arguments: list[Any] = ["log", "sync", str(run.folder), "--to", "mlflow"]
    arguments += [f"logger.mlflow.tracking_uri=sqlite:///{tmp_path}/other.db", "logger.num_rollouts_to_log=0"]
    assert main(arguments) == 0
    assert f"has the steps 1 to {STEPS} of {run.folder}; {STEPS} were sent now" in capsys.readouterr().out
    compare(tracker_readers.mlflow(f"sqlite:///{tmp_path}/other.db"), run.folder, is_filled_anew=True)
    assert main(arguments) == 0
    assert "; 0 were sent now" in capsys.readouterr().out
    assert main(["log", "sync", str(tmp_path), "--to", "mlflow"]) == 64
    assert "holds no run with steps" in capsys.readouterr().err
