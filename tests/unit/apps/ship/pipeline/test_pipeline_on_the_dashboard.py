"""A pipeline on the dashboard: its stages, and the one under way."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.apps.ship.pipeline.records import Iteration, ModelChoice, StageMark, StageOutcome, StageRecord
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace
from posttrain.apps.watch.shipping import pipeline_page


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
