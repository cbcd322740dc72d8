"""What the recorder shows and keeps, seen through its public face."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
from typing import Any

import pytest

from posttrain.errors import ExitCode, Superseded
from posttrain.files.run_folder_lock import Attempt
from posttrain.recipes.dpo import DpoRecipe
from posttrain.recipes.grpo import GrpoRecipe
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.rm import RewardModelRecipe
from posttrain.recipes.sft import SftRecipe
from posttrain.reporting import recorder as recorder_module
from posttrain.reporting.presentation import RecorderSettings
from posttrain.reporting.recorder import RunRecorder
from posttrain.reporting.rows import Hardware
from posttrain.types import Score, StepReport


def test_step_block_has_the_lines_of_the_guides_in_their_order(bench: Any, group: Any, report: Any) -> None:
    recorder = bench.recorder(device_word="GPU", hardware=Hardware(2, 1e13, 1e10), max_steps=100, refit_remark="shared")
    recorder.begin_step(5)
    with recorder.progress("generation", 512), recorder.progress("scoring", 512):
        pass
    for _ in range(2):  # two updates of one step
        with recorder.progress("training", 4):
            pass
    metrics = {"reward_std": 0.25, "reward_min": 0.0, "reward_max": 1.0}
    timings = {"generation": 4.0, "reward_calculation": 1.0, "policy_training": 2.0, "total_step_time": 8.0}
    timings |= {"prepare_for_generation/transfer_and_update_weights": 0.0, "checkpointing": 0.5}
    step = report(5, groups=(group(0), group(1)), **metrics)
    recorder.record_step(5, dataclasses.replace(step, timings_s=timings), None)
    block = bench.log[bench.log.index("=====") :]
    assert block.splitlines() == [
        "========================= Step 5/100 =========================",
        "▶ Preparing batch...",
        "▶ Generating responses for batch of size 512...",
        "▶ Processing rewards...",
        "▶ Training policy...",
        "[Generate] 2 prompts x 2 generations = 4 responses (4.00s)",
        "[Reward]   mean=0.5000, std=0.2500, min=0.0000, max=1.0000",
        "[Train]    loss=0.0200, kl=0.0050, grad_norm=0.3333",
        "[Time]     total=8.00s (gen=4.00s, reward=1.00s, train=2.00s)",
        f"Logged data to {bench.folder}/rollouts/step_5.jsonl.gz",
        "Training Results:",
        "  • Loss: 0.0200",
        "  • Avg Reward: 0.5000",
        "  • KL: 0.0050",
        "  • Grad Norm: 0.3333",
        "  • Unscored: 0 of 4",
        "Timing:",
        "  • Total step time: 8.00s",
        "  • generation: 4.00s (50.0%)",
        "  • policy_training: 2.00s (25.0%)",
        "  • reward_calculation: 1.00s (12.5%)",
        "  • prepare_for_generation/transfer_and_update_weights: 0.00s (0.0%, shared)",
        "  • prepare_for_generation/total: 0.00s (0.0%)",
        "  • Left for the run: about 12m 40s",
        "Performance Metrics:",
        "  • Mean Total Tokens per Sample: 50.00",
        "  • Throughputs (per GPU):",
        "    - E2E (Samples/sec/gpu): 1.25",
        "    - E2E (Tokens/sec/gpu): 62.50",
        "    - Policy Training (Tokens/sec/gpu): 250.00",
        "    - Training Worker Group (Tokens/sec/gpu): 250.00",
        "    - Generation Worker Group (Tokens/sec/gpu): 125.00",
        "  • Throughputs (per Group):",
        "    - E2E (Samples/sec): 2.50",
        "    - E2E (Tokens/sec): 125.00",
        "    - Training Worker Group (Tokens/sec): 500.00",
        "    - Generation Worker Group (Tokens/sec): 250.00",
        "  • Training FLOPS: 5.00 TFLOPS (2.50 TFLOPS per GPU)",
        "  • Training Model Floating Point Utilization: 25.00%",
    ]


def test_utilisation_of_a_device_without_a_known_peak_is_not_a_number(bench: Any, report: Any) -> None:
    bench.recorder(hardware=Hardware(2, flops_per_token=1e10)).record_step(1, report(), None)
    assert "Training Model Floating Point Utilization: n/a (the peak of this device is not known)" in bench.log


def test_generate_line_has_the_age_of_asynchronous_groups(bench: Any, group: Any, report: Any) -> None:
    bench.recorder().record_step(1, report(groups=(group(0),), trajectory_age_mean=0.5), None)
    assert "responses, begun 0.50 steps ago on average (4.00s)" in bench.log


def test_generate_line_says_what_was_sampled_beyond_and_what_was_recorded(bench: Any, group: Any, report: Any) -> None:
    fresh, recorded = group(0), group(1, ("a",))
    completion = dataclasses.replace(recorded.rollouts[0].completion, logprobs=())
    recorded = dataclasses.replace(
        recorded, rollouts=(dataclasses.replace(recorded.rollouts[0], completion=completion),)
    )
    bench.recorder().record_step(1, report(groups=(fresh, recorded), num_samples=8), None)
    assert "[Generate] 2 prompts = 3 responses, of 8 sampled, 1 of them recorded (4.00s)" in bench.log


def test_step_without_a_scored_response_says_so(bench: Any, group: Any) -> None:
    failed = (Score(None, error="time-out"), Score(None, error="time-out"))
    report = StepReport({"loss": 0.0}, {"total_step_time": 1.0}, (group(scores=failed),), 10, 2)
    bench.recorder().record_step(1, report, None)
    assert "[Reward]   no response could be scored\n" in bench.log


def test_a_log_gets_every_block_and_a_console_one_line_a_step(bench: Any, on_terminal: Any, report: Any) -> None:
    for place in (bench, on_terminal):
        recorder = place.recorder(max_steps=3, quiet=False)
        for step in (1, 2, 3):
            recorder.begin_step(step)
            recorder.record_step(step, report(step, step_s=0.5), None)
        recorder.finish("finished")
        assert re.findall(r"= Step (\d)/3 =", place.log) == ["1", "2", "3"]
        assert place.log.count("[Train] ") == 3
        assert place.log.count("Max number of steps has been reached (3)") == 1
    assert len(re.findall(r"^Step \d/3 .* Reward ", bench.output, re.MULTILINE)) == 3
    assert bench.output.count("\n") < 10, "one line a step"
    assert "= Step" not in on_terminal.output
    assert "[Train]" not in on_terminal.output
    assert on_terminal.output.count("\nstep ") == 3


def test_the_time_of_a_save_stands_in_the_block_of_its_own_step_and_not_in_the_next(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=2)
    for step in (1, 2):
        recorder.begin_step(step)
        row = report(step)
        if step == 2:  # the row of the next step has the time of the save
            row = dataclasses.replace(row, timings_s={**row.timings_s, "checkpointing": 2.0})
        recorder.record_step(step, row, None)
        if step == 1:
            recorder.record_save(1, 2.0, "/run/tmp_step_1/policy/tokenizer")
    first, second = bench.log.split("= Step 2/2 =")
    assert "Saving tokenizer (or processor) to /run/tmp_step_1/policy/tokenizer\n" in first
    assert "[Time]     ckpt=2.00s\n" in first
    assert "  • checkpointing: 2.00s (25.0%)\n" in first
    assert "checkpointing" not in second
    assert "ckpt" not in bench.output


def test_verbose_shows_the_block_without_a_terminal(bench: Any, report: Any) -> None:
    bench.recorder(verbose=True).record_step(1, report(), None)
    assert bench.output == bench.log
    assert "Training Results:" in bench.output


def test_log_has_what_was_said_before_the_folder_was_opened_and_what_quiet_hides(bench: Any, report: Any) -> None:
    recorder = bench.recorder(quiet=True)
    recorder.record_step(1, report(), None)
    assert "Training Results:" in bench.log
    assert bench.output == ""
    early = bench.make(stream=io.StringIO())
    early.warn("2 rows left out")
    early.start(1)
    assert bench.log.index("Training Results:") < bench.log.index("2 rows left out"), "a resumed run appends"


def test_header_comes_with_the_results_without_begin_step(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    recorder.record_step(1, report(1), None)
    assert bench.log.count("= Step 1/10 =") == 1


def test_a_terminal_gets_one_line_per_step_with_the_trend_and_an_answer_every_ten_seconds(
    on_terminal: Any, report: Any, group: Any
) -> None:
    recorder = on_terminal.recorder(max_steps=100)
    for step in range(1, 31):
        on_terminal.clock.now += 1.0
        recorder.begin_step(step)
        recorder.stage("Training policy")
        recorder.record_step(step, report(step, step_s=20.0, groups=(group(),)), report() if step == 25 else None)
    lines = re.findall(r"^step +(\d+)/100 .*", on_terminal.output, re.MULTILINE)
    assert [int(step) for step in lines] == list(range(1, 31))
    assert on_terminal.output.count("1.0000 │ 4") == 3  # steps 1, 11 and 21
    assert "(+1 in 20 steps)" in on_terminal.output  # the reward rises by 0.1 a step
    assert "Training Results:" not in on_terminal.output
    assert "▶" not in on_terminal.output


def test_verbose_shows_the_long_form_on_a_terminal_too(on_terminal: Any, report: Any) -> None:
    recorder = on_terminal.recorder(verbose=True)
    recorder.begin_step(1)
    recorder.record_step(1, report(), None)
    assert "= Step 1/10 =" in on_terminal.output
    assert "Training Results:" in on_terminal.output
    assert "\nstep " not in on_terminal.output


def test_the_header_says_what_is_trained_and_whether_the_folder_is_new(bench: Any, report: Any) -> None:
    header = ["model    some model", "data     7 prompts"]
    bench.recorder(header=header).record_step(1, report(), None)
    assert bench.output.startswith(f"model    some model\ndata     7 prompts\nfolder   {bench.folder}, new\n")
    bench.recorder(resumed_step=1, header=header)
    assert f"folder   {bench.folder}, resumed after step 1\n" in bench.output


@pytest.mark.parametrize(
    ("recipe", "metrics", "expected"),
    [
        (DpoRecipe, {"accuracy": 0.75, "rewards_chosen_mean": 1.5}, ["Accuracy: 0.7500", "Chosen Reward: 1.5000"]),
        (RewardModelRecipe, {"accuracy": 0.75, "rewards_std": 0.5}, ["Accuracy: 0.7500", "Spread of Rewards: 0.5000"]),
        (SftRecipe, {"lr": 2e-5}, ["Loss: 0.1000", "Learning Rate: 2.00e-05"]),
    ],
)
def test_each_kind_of_run_shows_its_own_metrics(
    bench: Any, report: Any, recipe: type[Recipe], metrics: Any, expected: list[str]
) -> None:
    bench.recorder(presentation=recipe.presentation).record_step(1, report(**metrics), None)
    assert [text for text in expected if f"  • {text}\n" in bench.log] == expected
    assert "Avg Reward" not in bench.log


def test_remaining_time_follows_the_clock(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=10)
    recorder.record_step(1, report(1), None)
    assert "Left for the run: about 1m 12s" in bench.log  # nine steps of the 8 s that the first one reports
    for step in (2, 3):
        bench.clock.now += 20.0
        recorder.record_step(step, report(step), None)
    assert "Left for the run: about 2m 20s" in bench.log  # seven steps at 20 s by the clock


def test_validation_before_training_is_a_row_of_step_0(bench: Any, group: Any) -> None:
    recorder = bench.recorder(num_val_samples_to_print=1)
    validation = StepReport(
        {"accuracy": 0.25, "mean_generation_length": 12.34, "reward_std": 0.5},
        {"total_validation_time": 3.0},
        (group(),),
        10,
        256,
    )
    recorder.record_validation(0, validation)
    assert bench.rows() == [
        {
            "step": 0,
            "validation/accuracy": 0.25,
            "validation/mean_generation_length": 12.34,
            "validation/reward_std": 0.5,
            "timing/validation/total_validation_time": 3.0,
        }
    ]
    assert "  • Accuracy: 0.2500\n  • Average response length: 12.3 tokens\n  • Samples processed: 256" in bench.output
    assert "    answer │ 4" in bench.output
    assert (bench.folder / "rollouts" / "validation_step_0.jsonl.gz").exists()


def test_warning_is_shown_once_counted_and_in_the_report(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    recorder.record_step(1, report(1), None)
    for _ in range(3):
        recorder.warn("all rewards are equal")
    recorder.warn("something else")
    recorder.finish("done")
    assert bench.output.count("warning: all rewards are equal") == 1
    assert "3 warnings like: all rewards are equal" in bench.output
    assert "all rewards are equal" in (bench.folder / "report.html").read_text()
    resumed = bench.recorder(resumed_step=1)
    resumed.warn("all rewards are equal")
    assert bench.output.count("warning: all rewards are equal") == 2  # once per process
    resumed.finish("done")
    warnings = json.loads((bench.folder / "run.json").read_text())["warnings"]
    assert {row["text"]: row["count"] for row in warnings} == {"all rewards are equal": 4, "something else": 1}


def test_warnings_that_differ_in_numbers_only_are_one_warning(bench: Any) -> None:
    recorder = bench.recorder()
    for step in (3, 4, 11):
        recorder.warn(f"step {step}: {step + 1} of 64 rollouts are unscored, {step / 8:g} of all")
    assert re.findall(r"^warning: (.*)", bench.output, re.MULTILINE) == [
        "step 3: 4 of 64 rollouts are unscored, 0.375 of all"
    ]


def test_warning_before_start_is_kept(bench: Any) -> None:
    recorder = bench.make(presentation=SftRecipe.presentation, max_steps=1, config_yaml="")
    recorder.warn("data.train: 3 rows left out: too long")
    recorder.start(0)
    recorder.finish("finished")
    assert "data.train: 3 rows left out" in (bench.folder / "report.html").read_text()


def test_first_traceback_is_shown_once_and_reasons_are_counted(bench: Any, group: Any, report: Any) -> None:
    failed = Score(None, error="ValueError: bad", traceback="Traceback:\n  ValueError: bad\n")
    late = Score(None, error="timeout after 5 s")
    recorder = bench.recorder()
    for step in (1, 2):
        scores = (failed, failed, late)
        recorder.record_step(step, report(step, unscored=3, groups=(group(0, ("a", "b", "c"), scores),)), None)
    assert bench.log.count("Traceback:") == 1
    assert bench.log.count("Unscored: 3 of 3 (2 × ValueError: bad, 1 × timeout after 5 s)") == 2
    rows = [json.loads(line) for line in (bench.folder / "unscored.jsonl").read_text().splitlines()]
    counts = [(row["step"], row["reason"], row["count"], bool(row["traceback"])) for row in rows]
    assert counts == [
        (1, "ValueError: bad", 2, True),
        (1, "timeout after 5 s", 1, False),
        (2, "ValueError: bad", 2, False),
        (2, "timeout after 5 s", 1, False),
    ]
    bench.recorder(resumed_step=1)
    assert (bench.folder / "unscored.jsonl").read_text().count('"step": 2') == 0


def test_number_of_failure_reasons_per_step_is_limited(bench: Any, group: Any, report: Any) -> None:
    scores = tuple(Score(None, error=f"KeyError: {index}") for index in range(50))
    bench.recorder().record_step(1, report(unscored=50, groups=(group(0, ("x",) * 50, scores),)), None)
    rows = [json.loads(line) for line in (bench.folder / "unscored.jsonl").read_text().splitlines()]
    assert len(rows) == 21
    assert rows[-1]["reason"] == "other reasons"
    assert sum(row["count"] for row in rows) == 50


def test_quiet_shows_only_warnings_and_the_summary(bench: Any, report: Any) -> None:
    recorder = bench.recorder(quiet=True)
    recorder.say("hello")
    recorder.stage("Training")
    recorder.begin_step(1)
    with recorder.progress("generation", 10) as advance:
        bench.clock.now += 100
        advance(5)
    recorder.record_step(1, report(), report())
    assert bench.output == ""
    recorder.warn("careful")
    assert bench.output == "warning: careful\n"
    recorder.finish("max_num_steps reached")
    assert "max_num_steps reached. 1 step," in bench.output
    assert "report.html" in bench.output


def test_summary_has_first_last_and_best(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    for step, reward in enumerate((0.25, 0.75, 0.5), start=1):
        bench.clock.now += 30
        recorder.record_step(step, report(step, reward=reward), None)
    recorder.finish("max_num_steps reached")
    assert "3 steps, 1m 30s in this process." in bench.output
    assert "train/reward: 0.2500 → 0.5000, best 0.7500 at step 2" in bench.output


def test_unwritable_report_does_not_end_the_run(bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk is full")

    recorder = bench.recorder()
    monkeypatch.setattr(recorder_module, "write_report", fail)
    recorder.record_step(1, report(1), None)
    recorder.finish("done")
    assert bench.output.count("warning: report.html could not be written: OSError: disk is full") == 1
    assert len(bench.rows()) == 1


def test_report_is_refreshed_at_most_every_ten_seconds(
    bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    monkeypatch.setattr(recorder_module, "write_report", lambda *_: written.append(bench.clock.now))
    recorder = bench.recorder(max_steps=100)
    for step in range(1, 31):
        bench.clock.now += 1.0
        recorder.record_step(step, report(step), None)
    recorder.finish("done")
    assert written == [1001.0, 1011.0, 1021.0, 1030.0]


def test_slow_report_is_written_less_often(bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []

    def slow(*_: object) -> None:
        written.append(bench.clock.now)
        bench.clock.now += 1.0

    monkeypatch.setattr(recorder_module, "write_report", slow)
    recorder = bench.recorder(max_steps=100)
    for step in range(1, 101):
        bench.clock.now += 1.0
        recorder.record_step(step, report(step), None)
    assert written == [1001.0, 1051.0, 1101.0]  # a second of work in fifty


def test_wall_time_includes_earlier_processes(bench: Any, report: Any) -> None:
    recorder = bench.recorder()
    bench.clock.now += 100
    recorder.record_step(1, report(1), None)  # killed here
    bench.clock.now += 5000
    resumed = bench.recorder(resumed_step=1)
    bench.clock.now += 50
    resumed.finish("done")
    info = json.loads((bench.folder / "run.json").read_text())
    assert info["wall_s"] == 150
    assert info["resumed_at_steps"] == [1]
    assert info["status"] == "ended early"  # one step of ten


def test_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path: Any, report: Any) -> None:
    def run(name: str, parts: list[tuple[int, int]]) -> bytes:
        for resumed_step, last in parts:
            recorder = RunRecorder(
                tmp_path / name,
                RecorderSettings(GrpoRecipe.presentation, max_steps=6, hardware=Hardware(1), config_yaml=""),
                stream=io.StringIO(),
            )
            recorder.start(resumed_step)
            for step in range(resumed_step + 1, last + 1):
                recorder.record_step(step, report(step), None)
        return (tmp_path / name / "metrics.jsonl").read_bytes()

    assert run("resumed", [(0, 5), (2, 3), (2, 6)]) == run("whole", [(0, 6)])


# -- one writer, and a folder that goes away ---------------------------------------------------------------------------


def test_an_attempt_that_was_superseded_writes_no_row(bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder))
    recorder.record_step(1, report(1), None)
    (bench.folder / "attempts" / "0002.json").write_text("{}")
    bench.clock.now += recorder_module.FENCE_PERIOD_S
    before = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    recorder.stage("Generating responses")
    for write in (lambda: recorder.record_step(2, report(2), None), lambda: recorder.finish("finished")):
        with pytest.raises(Superseded):
            write()
    assert {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("deleted", ["the folder", "its metrics"])
def test_a_deleted_folder_is_made_again_and_the_end_names_the_lost_steps(deleted: str, bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder), max_steps=4)
    for step in (1, 2, 3, 4):
        if step == 3:
            shutil.rmtree(bench.folder) if deleted == "the folder" else (bench.folder / "metrics.jsonl").unlink()
            recorder.stage("Generating responses")
        recorder.record_step(step, report(step), None)
    assert recorder.finish("finished") == ExitCode.CRASHED
    assert [row["step"] for row in bench.rows()] == [3, 4]
    assert {path.name for path in bench.folder.iterdir()} >= {"config.yaml", "run.json", "report.html", "attempts"}
    assert bench.output.count("was deleted or replaced after step 2") == 1
    assert "Generating responses" in (bench.folder / "logs" / "train.log").read_text()
    assert "the record of the steps up to 2 is lost" in bench.output


def test_a_folder_that_is_deleted_while_a_step_is_written_is_made_again(
    bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder), max_steps=2)
    recorder.record_step(1, report(1), None)
    append = recorder_module.append_rows

    def delete_and_append(path: Any, rows: Any) -> None:
        monkeypatch.setattr(recorder_module, "append_rows", append)
        shutil.rmtree(bench.folder)
        append(path, rows)

    monkeypatch.setattr(recorder_module, "append_rows", delete_and_append)
    recorder.record_step(2, report(2), None)
    assert recorder.finish("finished") == ExitCode.CRASHED
    assert [row["step"] for row in bench.rows()] == [2]


def test_a_folder_that_is_deleted_before_the_run_begins_has_lost_nothing(bench: Any, report: Any) -> None:
    attempt = Attempt(bench.folder)
    shutil.rmtree(bench.folder)
    recorder = bench.recorder(attempt=attempt, max_steps=1)
    recorder.record_step(1, report(1), None)
    assert recorder.finish("finished") == ExitCode.DONE


def test_a_run_without_any_score_says_so_at_its_end_and_when_started_again(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=2)
    for step in (1, 2):
        recorder.record_step(step, report(step, unscored=20, num_samples=20), None)
    assert recorder.finish("finished") == ExitCode.NO_PROGRESS
    assert "finished, but not one of the 40 rollouts could be scored" in bench.output
    assert bench.recorder(resumed_step=2, max_steps=2).finish("nothing to do") == ExitCode.NO_PROGRESS


def test_one_score_makes_a_run_count(bench: Any, report: Any) -> None:
    recorder = bench.recorder(max_steps=1)
    recorder.record_step(1, report(1, unscored=19, num_samples=20), None)
    assert recorder.finish("finished") == ExitCode.DONE


def test_a_deleted_folder_of_attempts_loses_no_record(bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder), max_steps=2)
    recorder.record_step(1, report(1), None)
    shutil.rmtree(bench.folder / "attempts")
    recorder.record_step(2, report(2), None)
    assert recorder.finish("finished") == ExitCode.DONE
    assert [row["step"] for row in bench.rows()] == [1, 2]
    assert (bench.folder / "attempts" / "0001.json").exists()


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_lost_record_stays_lost_when_the_run_is_started_again(max_steps: int, bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder), max_steps=2)
    recorder.record_step(1, report(1), None)
    (bench.folder / "metrics.jsonl").unlink()
    recorder.record_step(2, report(2), None)
    assert recorder.finish("finished") == ExitCode.CRASHED
    again = bench.recorder(resumed_step=2, max_steps=max_steps)
    assert again.finish("nothing to do") == ExitCode.CRASHED
    assert bench.output.count("the record of the steps up to 1 is lost") == 2
    assert bench.recorder(resumed_step=0, max_steps=2).finish("stopped") == ExitCode.DONE, "a new run has lost nothing"


def test_log_of_an_attempt_begins_with_its_number_host_and_time(bench: Any) -> None:
    for number in (1, 2):
        attempt = Attempt(bench.folder)
        recorder = bench.make(stream=io.StringIO(), attempt=attempt)
        recorder.warn(f"said before start {number}")
        recorder.start(0)
        attempt.end(85)
        assert bench.log.index(f"= attempt {number}: ") < bench.log.index(f"said before start {number}")
        heading = f"==== attempt {number}: process {os.getpid()} on {os.uname().nodename} "
        assert bench.log.count(heading) == 1
        assert f"since {attempt.record.started}" in bench.log


def test_log_looks_for_a_newer_attempt_once_a_second_at_most(
    bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder))
    looks: list[int] = []

    def look(attempt: Attempt) -> bool:
        looks.append(attempt.number)
        return False

    monkeypatch.setattr(Attempt, "is_superseded", property(look))
    bench.clock.now += 10.0
    for _ in range(50):
        recorder.say("a line")
    assert len(looks) == 1
    bench.clock.now += recorder_module.FENCE_PERIOD_S
    recorder.say("a line")
    assert len(looks) == 2
    assert bench.log.count("a line\n") == 51


def test_a_crash_is_written_to_run_json_report_and_log_without_credentials(bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder))
    recorder.record_step(1, report(1), None)
    recorder.record_crash(
        RuntimeError("no route to https://me:secret99@host/x"), "Traceback\n  https://me:secret99@host/x\n"
    )
    info = json.loads((bench.folder / "run.json").read_text())
    assert (info["status"], info["reason"]) == ("crashed", "RuntimeError: no route to https://me:***@host/x")
    assert bench.log.endswith("Traceback\n  https://me:***@host/x\n")
    assert "crashed" in (bench.folder / "report.html").read_text()
    assert "Traceback" not in bench.output, "the command prints it"


def test_a_crash_while_the_run_begins_leaves_the_state_of_the_attempt_before(
    bench: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.recorder(max_steps=2).record_step(1, report(1), None)
    before = (bench.folder / "run.json").read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr(recorder_module, "open_run", fail)
    recorder = bench.make(stream=io.StringIO())
    with pytest.raises(OSError, match="injected"):
        recorder.start(1)
    recorder.record_crash(OSError("injected"), "Traceback\n")
    assert bench.log.endswith("Traceback\n")
    assert (bench.folder / "run.json").read_bytes() == before


def test_a_crash_after_a_newer_attempt_began_is_not_written(bench: Any, report: Any) -> None:
    recorder = bench.recorder(attempt=Attempt(bench.folder))
    recorder.record_step(1, report(1), None)
    (bench.folder / "attempts" / "0002.json").write_text("{}")
    before = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    recorder.record_crash(RuntimeError("x"), "Traceback\n")
    assert {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()} == before
