"""What trackers have of a run, read with their own readers: the numbers of each step, each time they are there."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[int, dict[str, list[float]]]  # step -> metric -> every value that the tracker has for it


def _empty() -> Values:
    return defaultdict(lambda: defaultdict(list))


def tensorboard(folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "loggers" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = _empty()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found[event.step][tag].append(event.value)
    return found


def wandb(folder: Path) -> Values:
    """Of the offline files: records of protobuf in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = _empty()
    for file in (folder / "loggers" / "wandb" / "wandb").glob("offline-run-*/*.wandb"):
        for content in _log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                names = [item.key] if item.key else list(item.nested_key)
                if len(names) == 1 and names[0][0] != "_":  # its own counters begin with _, and tables are nested
                    found[record.history.step.num][names[0]].append(float(json.loads(item.value_json)))
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    position, whole, block = 7, b"", 32768
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def swanlab(folder: Path) -> Values:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = _empty()
    for file in (folder / "loggers" / "swanlab").glob("run-*/*.swanlab"):
        reader = DataStoreReader()
        reader.open(file)
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            scalar = record.scalar
            if record.WhichOneof("record_type") == "scalar" and not scalar.key.startswith("__"):
                found[scalar.step][scalar.key].append(scalar.value.number)
    return found


def mlflow(uri: str) -> Values:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("posttrain")
    (run,) = client.search_runs([experiment.experiment_id])
    found = _empty()
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            found[metric.step][key].append(metric.value)
    return found


def trackio() -> Values:
    """Of the database in TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("posttrain")
    found = _empty()
    for row in SQLiteStorage.get_logs("posttrain", run):
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                found[row["step"]][key].append(value)
    return found


class MlflowServer:
    """MLflow's own server over one database, which can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        environment: dict[str, Any] = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self._folder
            )
        for _ in range(600):
            assert self._process.poll() is None, (self._folder / "mlflow.log").read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError("the server of MLflow does not answer")

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
