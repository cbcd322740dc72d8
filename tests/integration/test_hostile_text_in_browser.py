"""Hostile text in everything that a page shows, in a real Chromium: none of it runs, loads or sends anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsers import chromium, visiting, watching
from gate_folders import write_evaluation
from made_runs import FINDING, HEADLINE, append, make_run, write_groups

from posttrain.apps.evaluate.comparison import compare, comparison_page
from posttrain.apps.ship.gate.report import as_html, as_json
from posttrain.apps.ship.gate.verdict import judge
from posttrain.apps.ship.pipeline.kpi import KpiRow
from posttrain.apps.ship.pipeline.page import kpi_svg, pipeline_page
from posttrain.apps.ship.pipeline.records import Iteration, ModelChoice, StageMark, StageOutcome, StageRecord
from posttrain.config.gate import GateConfig
from posttrain.config.pipeline import PipelineConfig
from posttrain.reporting.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUNS = "window.attacked=1"
ATTACK = (
    f"\"'--></script></title></style></textarea></pre><img src=x onerror={RUNS}><script>{RUNS}</script>"
    f'<svg onload={RUNS}><iframe srcdoc="<script>parent.attacked=1</script>"></iframe><a href=javascript:{RUNS}>a</a>'
    "<link rel=stylesheet href=//evil.example/x><base href=//evil.example>{{7*7}}${7*7}\u2028\u202e\0\x1b[31m\ud800"
)
SHORT = f"<img src=x onerror={RUNS}>"  # where a slash or many characters are not possible
ODD_NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def attacked_run(folder: Path) -> Path:
    """Every text that a run folder can hold is hostile, and the names of metrics are."""
    make_run(folder, steps=12, sick=True, title=ATTACK)
    chart = {"title": ATTACK, "curves": [["train/reward", ATTACK], [f"train/{SHORT}", ATTACK]], "note": ATTACK}
    info = json.loads((folder / "run.json").read_text())
    info |= {
        "headline": {**HEADLINE, "name": ATTACK, "chart": chart},
        "algorithm": "grpo",
        "status": SHORT,
        "reason": ATTACK,
        "device_word": SHORT,
        "started_at": ATTACK,
        "updated_at": ATTACK,
        "config_changes": [{"from_step": 2, "key": ATTACK, "old": ATTACK, "new": ATTACK}],
        "warnings": [{"step": 1, "text": ATTACK, "count": 3}],
    }
    (folder / "run.json").write_text(json.dumps(info))
    names = (SHORT, f"reward/{SHORT}", *ODD_NAMES)
    for step in range(13, 16):
        append(
            folder / "metrics.jsonl", {"step": step, "train/reward": 0.5, **{f"train/{name}": step for name in names}}
        )
        append(folder / "metrics.jsonl", {"step": step, **dict.fromkeys(ODD_NAMES, step), f"timing/train/{SHORT}": 1.0})
    answer = {"id": ATTACK, "text": ATTACK, "reward": 1.0, "num_tokens": 3}
    hostile = {"rule": ATTACK, "text": ATTACK, "fixes": [ATTACK, f"a.b={SHORT}"], "source": ATTACK}
    append(folder / "findings.jsonl", {**FINDING, **hostile, "metric": f"train/{SHORT}", "answers": [answer]})
    append(folder / "unscored.jsonl", {"step": 15, "stage": ATTACK, "reason": ATTACK, "count": 1})
    rank = {"rank": ATTACK, "host": ATTACK, "pid": ATTACK, "device": ATTACK, "allocated_bytes": ATTACK}
    append(folder / "workers.jsonl", {"step": 15, "time": 1.0, "phase": ATTACK, "ranks": [rank]})
    append(folder / "workers.jsonl", *({"step": 15, "time": time, "phase": ATTACK} for time in (2.0, 3.0)))
    attempt = {"number": ATTACK, "holder": {"host": ATTACK, "pid": ATTACK, "since": ATTACK}, "ended": ATTACK}
    (folder / "attempts" / "0001.json").write_text(
        json.dumps({**attempt, "exit_code": ATTACK, "last_checkpoint": SHORT})
    )
    (folder / "config.yaml").write_text(json.dumps({"policy": {SHORT: ATTACK[:-1], "model_name": SHORT}}))
    (folder / "config_from_step_3.yaml").write_text(f"# {SHORT}\npolicy: {{lr: 1}}\n")
    base = {"reward": 1.0, "parts": {SHORT: 1.0, ATTACK: 0.5}, "advantage": 1.0, "num_tokens": 3, "error": ATTACK}
    turns = [{"role": ATTACK, "text": ATTACK, "num_tokens": ATTACK}]
    answers = [
        {**base, "text": ATTACK, "counts": {ATTACK: 1}},
        {**base, "text": ATTACK, "turns": turns, "reward": None},
    ]
    group = {"draw": 1, "id": ATTACK, "prompt": ATTACK, "reference": ATTACK, "completions": answers}
    for kind in ("step", "validation_step"):
        write_groups(folder, 15, [group, {**group, "reference": {SHORT: [ATTACK]}}], kind=kind)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("hostile")
    attacked_run(home / SHORT)
    make_run(home / "good", steps=3)
    write_pipeline(home / f"pipeline {SHORT}")
    write_pipeline(home / "second")
    (home / "second" / "iteration_1" / "iteration.json").write_text(f'{{"{SHORT}": 1}}')
    return home


def write_pipeline(home: Path) -> None:
    stage = home / "iteration_1" / "train-abc"
    stage.mkdir(parents=True)
    outcome = StageOutcome(ATTACK, ATTACK, report=f"../../javascript:{RUNS}")
    StageRecord("train", "abc", {}, outcome, 2.5, ATTACK, ATTACK, stage).write()
    marks = {"train": StageMark(folder="iteration_1/train-abc"), "convert": StageMark(skipped=ATTACK)}
    choice = ModelChoice(ATTACK, ATTACK)
    Iteration(1, stage.parent, ATTACK, ATTACK, choice, ATTACK, choice, running=ATTACK, stages=marks).write()
    names = {field.name: ATTACK for field in fields(KpiRow)} | {"training_value": 1.0, "score": None, "version": ATTACK}
    (home / "kpi.json").write_text(json.dumps([names]))


def test_dashboard_runs_nothing_that_it_shows(browser: Browser, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version: dict[str, Any] = {
        "version": ATTACK,
        "stage": ATTACK,
        "at": ATTACK,
        "by": ATTACK,
        "note": ATTACK,
        "verdict": ATTACK,
    }
    version |= {"base_model": ATTACK, "metrics": {ATTACK: 1.0, SHORT: ATTACK}, "num_bytes": 3}
    change: dict[str, Any] = {
        "at": ATTACK,
        "by": ATTACK,
        "why": ATTACK,
        "action": ATTACK,
        "version": ATTACK,
        "forced": True,
    }
    change |= {"refused": ATTACK, "moves": [[ATTACK, ATTACK, ATTACK]]}
    models = {"models": [{"name": ATTACK, "versions": [version], "history": [change]}], "problem": ATTACK}
    monkeypatch.setattr("posttrain.apps.watch.app.registry_page", lambda location: models)
    monkeypatch.setattr("posttrain.apps.watch.catalogue.Catalogue.registries", {"a": SHORT, "b": f"x{SHORT}"})
    with watching(home) as address, visiting(browser, address) as visit:
        page = visit.page
        page.on("dialog", lambda dialog: visit.problems.append(dialog.message))
        run, good = visit.run(SHORT), visit.run("good")
        pipelines = page.request.get(f"{address}api/pipelines").json()["pipelines"]
        assert {bool(one["problem"]) for one in pipelines} == {True, False}
        for path, until in (
            ("/", f"text={SHORT}"),
            (f"/run/{run}", ".chart svg"),
            (f"/run/{run}/rollouts?step=15", ".answer"),
            (f"/run/{run}/rollouts?step=15&q=%3Cscript", ".answer"),
            (f"/run/{run}/rollouts?step=15&kind=validation&group=1", ".answer"),
            (f"/run/{run}/doctor", ".finding"),
            (f"/run/{run}/config?with={good}", ".differences"),
            (f"/run/{run}/cluster", "text=Starts of this run"),
            (f"/compare?run={run}&run={good}", ".chart svg"),
            (f"/diff?a={run}:train:15:0:0&b={run}:train:15:0:1", ".diff"),
            ("/pipelines", "text=pipeline"),
            *((f"/pipelines/{one['id']}", "h1 >> text=Pipeline") for one in pipelines),
            ("/registry", "text=onerror"),
            ("/registry/a", "table"),
        ):
            visit.go(path, until)
            page.locator("details:not([open]) > summary").evaluate_all("found => found.forEach((one) => one.click())")
            assert page.evaluate("window.attacked") is None, path
            assert page.evaluate("[...document.links].filter((one) => /^\\s*javascript:/i.test(one.href)).length") == 0
            assert page.locator("img, iframe, base").count() == 0, path
            assert page.get_by_text("This page cannot be shown").count() == 0, (
                f"{path}: {page.inner_text('#view')[:300]}"
            )


def assert_harmless(browser: Browser, path: Path, *, clicks: bool = True) -> None:
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    assert page.evaluate("window.attacked") is None
    assert "onerror" in page.evaluate("document.documentElement.textContent"), "the attack is shown as text"
    assert page.evaluate("document.querySelectorAll('img, iframe, base, [onload], [onerror]').length") == 0
    links = "[...document.querySelectorAll('a')].map((one) => String(one.href))"
    assert [one for one in page.evaluate(links) if not one.startswith("file:")] == []
    page.close()
    assert problems == []


def test_report_of_a_run_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    assert_harmless(browser, write_report(attacked_run(tmp_path / "run")))


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8", "backslashreplace")
    return path


def test_pages_of_evaluations_and_gates_run_nothing(browser: Browser, tmp_path: Path) -> None:
    def made(name: str, rewards: Any) -> Any:
        found = write_evaluation(tmp_path / name, rewards, model=ATTACK, text=lambda *_: ATTACK)
        problems = tuple(
            replace(one, prompt=ATTACK, expected=ATTACK, samples=tuple(replace(s, answer=ATTACK) for s in one.samples))
            for one in found.problems
        )
        return replace(found, problems=problems, folder=tmp_path / SHORT)

    first, second = made("a", [[0.0]] * 30 + [[1.0]] * 3), made("b", [[1.0]] * 30 + [[0.0]] * 2 + [[None]])
    assert_harmless(browser, written(tmp_path / "comparison.html", comparison_page(compare(first, second))))
    check = {"metric": "pass@1", "at_least": 0.1, "evaluation": SHORT}
    config = GateConfig.model_validate({"gate": {"min_problems": 2}, "checks": {ATTACK: check}})
    result = judge(config, {SHORT: second}, {SHORT: first})
    report = as_json(result, config, {SHORT: second}, {SHORT: first})
    assert_harmless(browser, written(tmp_path / "gate.html", as_html(report, result)))


def test_pages_of_pipelines_run_nothing(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "pipeline"
    write_pipeline(home)
    row = KpiRow(
        **{  # type: ignore[arg-type]
            **{field.name: None for field in fields(KpiRow)},
            **dict.fromkeys(("begun_at", "start", "dataset", "training_metric", "score_metric", "stage"), ATTACK),
            **dict.fromkeys(("iteration", "training_value", "score", "seconds", "device_hours", "version"), 1),
            "not_predicted": ATTACK,
            "finished": True,
            "verdict": "promote",
        }
    )
    config = PipelineConfig.model_construct(
        pipeline=PipelineConfig.model_fields["pipeline"].annotation.model_construct(  # type: ignore[union-attr]
            name=ATTACK, folder=str(home), start_from=ATTACK
        ),
        schedule=ATTACK,
    )
    assert_harmless(browser, written(tmp_path / "index.html", pipeline_page(config, [row])))
    picture = kpi_svg(ATTACK.replace("\0", "").replace("\x1b", ""), [row])
    assert_harmless(browser, written(tmp_path / "kpi.svg", picture.replace("\0", "").replace("\x1b", "")))
