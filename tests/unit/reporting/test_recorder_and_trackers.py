"""What the recorder tells trackers of a run, and by which name they know it."""

from __future__ import annotations

import json
from typing import Any

from posttrain.config.changes import ConfigChange
from posttrain.reporting.loggers.sink import RecordedRun
from posttrain.reporting.machines import GpuMonitor


class Trackers:
    """In place of `Loggers`: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, run: RecordedRun) -> list[str]:
        self.told.append(run)
        return ["logger.wandb_enabled: wandb is not installed"]

    def wake(self) -> list[str]:
        self.told.append("row")
        return ["logger mlflow: refused"]

    def finish(self, *, is_finished: bool, limit_s: float) -> list[str]:
        self.told.append(is_finished)
        return ["logger mlflow does not have all steps"]


def test_trackers_hear_of_the_run_of_each_row_and_of_the_end(bench: Any, report: Any) -> None:
    trackers = Trackers()
    recorder = bench.recorder(loggers=trackers, settings={"grpo.seed": 1}, title="GRPO of x")
    recorder.record_validation(0, report(1))
    recorder.record_step(1, report(1), None)
    recorder.finish("stopped")
    run = trackers.told[0]
    assert (run.folder, run.title, run.settings) == (bench.folder, "GRPO of x", {"grpo.seed": 1})
    assert trackers.told[1:] == ["row", "row", False]
    for line in ("wandb is not installed", "logger mlflow: refused", "mlflow does not have all steps"):
        assert sum(shown.startswith("warning: ") and line in shown for shown in bench.output.splitlines()) == 1


def test_a_crash_ends_trackers_too(bench: Any, report: Any) -> None:
    trackers = Trackers()
    recorder = bench.recorder(loggers=trackers)
    recorder.record_step(1, report(1), None)
    recorder.record_crash(RuntimeError("broken"), "Traceback")
    assert trackers.told[-1] is False


def test_trackers_know_a_resumed_run_and_a_fresh_one_is_another(bench: Any, report: Any) -> None:
    def identity(resumed_step: int, **options: Any) -> str:
        recorder = bench.recorder(resumed_step=resumed_step, **options)
        for step in range(resumed_step + 1, 4):
            recorder.record_step(step, report(step), None)
        return str(json.loads((bench.folder / "run.json").read_text())["record_id"])

    def changed(is_training: bool) -> Any:
        return lambda config_yaml: (ConfigChange("policy.lr", "1", "2", is_training),)

    first = identity(0)
    assert identity(3) == identity(2) == first
    assert identity(1, changes_since=changed(is_training=False)) == first
    assert identity(3, changes_since=changed(is_training=True)) == first  # no step is trained again
    assert identity(1, changes_since=changed(is_training=True)) != first  # steps 2 and 3 are, with other settings
    assert identity(0) != first


def test_what_is_seen_of_gpus_is_in_the_row_of_the_step(bench: Any, report: Any) -> None:
    recorder = bench.recorder(gpus=GpuMonitor(60.0, look=lambda: {"gpu_0_utilization": 50.0}))
    recorder.record_step(1, report(1), None)
    assert bench.rows()[0]["performance/gpu_0_utilization"] == 50.0
