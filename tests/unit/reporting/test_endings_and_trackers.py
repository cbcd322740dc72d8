"""A sick run does not look like a success, and trackers know a run by the same name when it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.config.changes import ConfigChange
from posttrain.recipes.sft import SftRecipe
from posttrain.reporting.doctor import Finding
from posttrain.reporting.loggers.sink import RecordedRun
from posttrain.reporting.machines import GpuMonitor
from posttrain.reporting.report import write_report
from posttrain.reporting.results import final_lines
from posttrain.reporting.rows import is_accuracy
from posttrain.reporting.run_files import append_rows
from posttrain.reporting.wording import validation_block

ERROR = Finding(2, "kl-runaway", "error", "train/kl_penalty", 6.8, "the policy is leaving", ("lr=1e-6",), "a guide")


def page(bench: Any, report: Any, *, start: bool, sick: bool) -> str:
    recorder = bench.recorder(max_steps=3)
    if start:
        recorder.record_validation(0, report(accuracy=0.2))
    for step in (1, 2, 3):
        recorder.record_step(step, report(step), report(accuracy=0.2 + 0.1 * step))
    if sick:
        append_rows(bench.folder / "findings.jsonl", [ERROR.to_json()])
    recorder.finish("finished")
    return write_report(bench.folder).read_text()


def test_a_sound_run_that_got_better_has_a_green_tile(bench: Any, report: Any) -> None:
    html = page(bench, report, start=True, sick=False)
    assert 'class="tile good"' in html
    assert 'class="status finished"' in html
    assert "before → after" in html
    assert "too early to tell" in html


def test_a_sick_run_has_none_and_its_finding_with_the_fix_is_on_the_page(bench: Any, report: Any) -> None:
    html = page(bench, report, start=True, sick=True)
    assert 'class="tile good"' not in html
    assert 'class="status sick"' in html
    assert "1 error" in html
    assert "<code>lr=1e-6</code>" in html
    assert '"kind":"error"' in html  # the mark on the KL curve


def test_before_and_after_need_a_validation_before_the_first_step(bench: Any, report: Any) -> None:
    html = page(bench, report, start=False, sick=False)
    assert "before → after" not in html
    assert "since step 1" in html


def test_a_metric_that_was_measured_once_has_no_trend() -> None:
    rows = [{"step": 0, "validation/loss": 7.5}, {"step": 1, "train/loss": 7.0}, {"step": 2, "train/loss": 6.0}]
    lines = [line.text for line in final_lines(SftRecipe.presentation.headline, rows, "finished", 1.0, "report.html")]
    assert "  • validation/loss: 7.5000 at step 0, measured once" in lines
    assert "  • train/loss: 7.0000 → 6.0000, best 6.0000 at step 2" in lines


@pytest.mark.parametrize(
    ("low", "high", "mean", "spread", "expected"),
    [(0, 1, 0.25, 0.1875**0.5, True), (0, 1.68, 1.2, 0.3, False), (0, 1, 0.5, 0.1, False), (1, 1, 1, 0, True)],
)
def test_a_mean_of_rewards_is_an_accuracy_if_each_of_them_is_0_or_1(
    low: float, high: float, mean: float, spread: float, expected: bool
) -> None:
    names = {"reward": mean, "reward_min": low, "reward_max": high, "reward_std": spread, "accuracy": mean}
    row: dict[str, Any] = {"step": 3, **{f"validation/{name}": value for name, value in names.items()}}
    assert is_accuracy(row) == expected
    shown = "\n".join(line.text for line in validation_block(row, 4))
    assert ("Accuracy" in shown, "Avg Reward" in shown) == (expected, not expected)


def test_a_share_of_pairs_is_an_accuracy() -> None:
    assert is_accuracy({"step": 1, "validation/accuracy": 0.7, "validation/loss": 0.5})


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
