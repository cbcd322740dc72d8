"""The doctor beside a run: what is written and shown when a problem is found, and what a resumed run says again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from made_groups import group as make_group

from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace
from posttrain.reporting.doctor.findings import kept_findings
from posttrain.reporting.examination import examine_folder
from posttrain.reporting.run_data import load_run
from posttrain.reporting.run_files import read_rows

SETTINGS = {"policy.optimizer.kwargs.lr": 1e-5, "loss_fn.reference_policy_kl_penalty": 0.01}
CONFIG = "policy:\n  optimizer:\n    kwargs:\n      lr: 1.0e-05\nloss_fn:\n  reference_policy_kl_penalty: 0.01\n"


def sick(report: Any, step: int) -> Any:
    """Steps with a KL that runs away from step 4 on."""
    plain = report(groups=(make_group(0, [1.0, 0.0]),))
    return replace(plain, metrics={**plain.metrics, "kl_penalty": 0.01 if step < 4 else 2.0})


def findings(bench: Any) -> list[dict[str, Any]]:
    return read_rows(bench.folder / "findings.jsonl")


def run(bench: Any, report: Any, first: int, last: int, **options: Any) -> Any:
    options = {"settings": SETTINGS, "config_yaml": CONFIG, **options}
    recorder = bench.recorder(resumed_step=first - 1, **options)
    for step in range(first, last + 1):
        recorder.record_step(step, sick(report, step), None)
    return recorder


def test_an_error_is_written_with_answers_and_shown_with_its_fix(bench: Any, report: Any) -> None:
    run(bench, report, 1, 7, quiet=True)
    (found,) = [row for row in findings(bench) if row["rule"] == "kl-runaway"]
    assert (found["step"], found["severity"], found["value"]) == (6, "error", 2.0)
    assert 1 <= len(found["answers"]) <= 3
    assert found["answers"][0]["text"]
    line = "doctor: kl-runaway (error) at step 6: the KL to the starting model is 2 per token"
    assert line in bench.output
    assert "fix: policy.optimizer.kwargs.lr=1e-6" in bench.output
    assert bench.output.count("kl-runaway") == 1  # not at every step


def test_the_summary_at_the_end_has_every_finding_and_run_json_their_number(bench: Any, report: Any) -> None:
    run(bench, report, 1, 10).finish("finished")
    assert "doctor: 1 error" in bench.output
    assert "kl-runaway (error), step 6 to 10" in bench.output
    assert json.loads((bench.folder / "run.json").read_text())["findings"]["error"] == 1


@pytest.mark.parametrize(("steps", "verdict"), [(1, "too early to tell (1 step)"), (5, "healthy")])
def test_a_run_without_findings_ends_with_a_verdict_when_there_are_enough_steps(
    bench: Any, report: Any, steps: int, verdict: str
) -> None:
    recorder = bench.recorder()
    for step in range(1, steps + 1):
        recorder.record_step(step, report(), None)
    recorder.finish("finished")
    assert f"doctor: {verdict}\n" in bench.output
    assert not (bench.folder / "findings.jsonl").exists()


def test_a_resumed_run_has_the_findings_of_the_uninterrupted_one_and_repeats_none(bench: Any, report: Any) -> None:
    run(bench, report, 1, 8)
    whole = findings(bench)
    (bench.folder / "findings.jsonl").unlink()
    run(bench, report, 1, 5)
    recorder = run(bench, report, 4, 8)  # the checkpoint was that of step 3
    assert findings(bench) == whole
    recorder = run(bench, report, 9, 10)
    assert findings(bench) == whole
    assert recorder.reason_to_stop() is None


def test_an_error_is_a_reason_to_stop_if_the_user_wants_it(bench: Any, report: Any) -> None:
    recorder = run(bench, report, 1, 5, stop_on_error=True)
    assert recorder.reason_to_stop() is None
    recorder.record_step(6, sick(report, 6), None)
    assert "kl-runaway" in (recorder.reason_to_stop() or "")
    recorder.record_step(7, sick(report, 7), None)
    assert recorder.reason_to_stop() is None  # the run was resumed and goes on


def test_without_that_wish_it_is_not(bench: Any, report: Any) -> None:
    assert run(bench, report, 1, 6).reason_to_stop() is None


def test_after_the_fact_the_same_is_found_from_the_folder(bench: Any, report: Any) -> None:
    run(bench, report, 1, 10).finish("finished")
    _, found = examine_folder(bench.folder)
    live = kept_findings(findings(bench))
    assert [replace(one, last_step=None) for one in found] == [replace(one, last_step=None) for one in live]
    lasting = {one.rule: (one.step, one.last_step) for one in found}
    assert lasting["kl-runaway"][1] == 10
    (view,) = Catalogue([LocalPlace(bench.folder)]).runs.values()
    for shown in (load_run(bench.folder).findings, view.findings):
        assert {one.rule: (one.step, one.last_step) for one in shown} == lasting


def test_a_rule_that_fails_ends_no_run(bench: Any, report: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of a rule")

    recorder = bench.recorder()
    monkeypatch.setattr(recorder._examination, "examine", broken)
    recorder.record_step(1, report(), None)
    assert "the doctor failed: ZeroDivisionError: of a rule" in bench.output
    assert len(bench.rows()) == 1
