"""A whole pipeline, as a user runs it: once in one go, once killed in the middle of every stage, then with new data."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tiny_pipelines
import tiny_runs
import yaml

pytest.importorskip("mlflow", reason="the registry needs the extra `registry`")

from posttrain.apps.ship.pipeline import kpi
from posttrain.apps.ship.pipeline.iteration_models import choose_models
from posttrain.apps.ship.pipeline.records import STAGES, Iteration, read_iterations
from posttrain.apps.ship.pipeline.stages import ALL_STAGES
from posttrain.apps.ship.registry import Registry, RegistryError
from posttrain.apps.ship.registry.store import DATABASE
from posttrain.cli.main import build_parser, main
from posttrain.cli.serve_command import options_of
from posttrain.config.loader import load_standalone
from posttrain.config.pipeline import PipelineConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a pipeline finds, and an empty registry for each of two: making the tables takes MLflow seconds."""
    world = tiny_pipelines.save_world(tmp_path_factory.mktemp("world"))
    for home in ("whole", "killed"):
        with Registry(world / "whole" / "registry")._store.writing():
            (world / home / "registry").mkdir(parents=True, exist_ok=True)
            if home != "whole":
                shutil.copy(world / "whole" / "registry" / DATABASE, world / home / "registry" / DATABASE)
    return world


@pytest.fixture(scope="module")
def uninterrupted(world: Path) -> Path:
    """pipeline.yaml of a pipeline whose first iteration is finished."""
    file = tiny_pipelines.write_file(world / "whole.yaml", tiny_pipelines.settings(world, world / "whole"))
    assert main(["pipeline", "run", str(file), "--quiet"]) == 0
    return file


def last_iteration(home: Path) -> Iteration:
    return read_iterations(home)[-1]


def results(home: Path) -> dict[str, Any]:
    """What a pipeline has made, without clocks, paths and hashes of either."""
    iteration = last_iteration(home)
    records = {name: iteration.record(name) for name in STAGES}
    assert all(record is not None for record in records.values())
    values = {name: record.outcome.values for name, record in records.items() if record is not None}
    evaluated = records["evaluate"]
    assert evaluated is not None
    problems = [
        (evaluated.folder / folder / "problems.jsonl").read_text()
        for side in ("candidate", "incumbent")
        for folder in values["evaluate"][side].values()
    ]
    registry = Registry(home / "registry")
    return {
        "dataset": records["dataset"].path("file").read_bytes(),  # type: ignore[union-attr]
        "training": [records["train"].outcome.digest, values["train"]["step"], values["train"]["value"]],
        "weights": (records["convert"].path("model") / "model.safetensors").read_bytes(),  # type: ignore[union-attr]
        "problems": problems,
        "gate": [values["gate"]["verdict"], values["gate"]["reasons"]],
        "registry": [(one.version, one.stage, dict(one.lineage.metrics)) for one in registry.versions("tiny")],
        "history": [(entry.change.version, entry.change.to, entry.change.why) for entry in registry.history("tiny")],
        "serve": [word.replace(str(home), "HOME") for word in values["canary"]["command"]],
    }


# -- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.invariant
def test_one_command_goes_from_traces_to_a_canary(world: Path, uninterrupted: Path) -> None:
    home = world / "whole"
    iteration = last_iteration(home)
    assert iteration.finished
    assert list(iteration.stages) == list(STAGES)
    version = Registry(home / "registry").get("tiny", "canary")
    assert version.lineage.verdict == "promote"
    assert version.lineage.base_model == str(world / "base")
    assert "training/accuracy" in version.lineage.metrics
    assert "main/avg@1" in version.lineage.metrics
    assert version.lineage.data_hash is not None
    trained = iteration.record("train")
    assert trained is not None
    rows = tiny_runs.rows_of(trained.folder / "run")
    assert len(rows) == tiny_pipelines.STEPS
    assert trained.outcome.values["value"] == pytest.approx(sum(row["train/accuracy"] for row in rows[-10:]) / 10)


def test_the_serve_command_that_it_writes_is_one(world: Path, uninterrupted: Path) -> None:
    record = last_iteration(world / "whole").record("canary")
    assert record is not None
    written = yaml.safe_load(record.path("file").read_text())
    command = written["command"]
    options = options_of(build_parser().parse_args(command[1:]))
    assert options.model == str(world / "base"), "nothing is in production, so the base model is what it stands beside"
    assert options.canary == "registry:tiny@canary"
    assert options.canary_rules is not None
    assert options.canary_rules.share == 0.1
    assert options.served_name == "tiny"
    assert record.path("script").read_text().splitlines()[-1].startswith("exec posttrain serve ")


def test_reports_are_linked_and_the_kpi_is_drawn(world: Path, uninterrupted: Path) -> None:
    home = world / "whole"
    page = (home / "index.html").read_text()
    links = re.findall(r'href="([^"]+)"', page)
    assert len(links) == len(STAGES)
    assert all((home / link).is_file() for link in links)
    [row] = json.loads((home / "kpi.json").read_text())
    assert row["verdict"] == "promote"
    assert row["score"] is not None
    assert row["traces_reward"] == 0.5
    assert row["incumbent_score"] is not None
    assert 0 < row["device_hours"] * 3600 <= row["seconds"]
    assert row["cost"] == pytest.approx(3600.0 * row["device_hours"])
    assert row["predicted"] is None
    assert "no machine is known to plan for" in page, "the first iteration on a machine that the planner does not know"
    trained = last_iteration(home).record("train")
    assert trained is not None
    assert row["actual"]["cost"] == pytest.approx([trained.seconds] * 2)
    drawing = ElementTree.parse(home / "kpi.svg").getroot()
    assert drawing.tag.endswith("svg")
    assert f"{row['score']:.4f}" in page


def test_a_second_run_does_nothing(world: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((world / "whole").rglob("stage.json"))
    before = [file.stat().st_mtime_ns for file in files]
    assert main(["pipeline", "run", str(uninterrupted)]) == 0
    assert sorted((world / "whole").rglob("stage.json")) == files
    assert [file.stat().st_mtime_ns for file in files] == before
    said = capsys.readouterr().err
    assert said.count(" unchanged: ") == len(STAGES)
    assert main(["pipeline", "run", str(uninterrupted), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("nothing that it reads has changed") == len(STAGES)


def test_the_stage_of_a_version_is_asked_of_the_registry_that_has_it(
    uninterrupted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages(*overrides: str) -> list[str | None]:
        assert main(["pipeline", "status", str(uninterrupted), "--json", *overrides]) == 0
        return [row["stage"] for row in json.loads(capsys.readouterr().out)]

    def unreachable(config: PipelineConfig) -> Any:
        raise RegistryError("http://registry: no answer")

    assert stages() == ["canary"]
    assert stages("pipeline.name=another") == [None], "its version 1 is another model's"
    monkeypatch.setattr(kpi, "versions_of", unreachable)
    assert stages() == [None]
    assert main(["pipeline", "status", str(uninterrupted)]) == 0
    assert "promoted" in (shown := capsys.readouterr().out)
    assert "1, stage unknown" in shown


def test_dry_run_lists_stages_and_reasons(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "run", str(uninterrupted), "--dry-run", "canary.share=0.5"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        next(line for line in said if line.startswith("canary"))
        .split(maxsplit=1)[1]
        .startswith("run        share changed: 0.1 → 0.5")
    )
    overrides = json.dumps([*yaml.safe_load(uninterrupted.read_text())["train"]["overrides"], "dpo.seed=7"])
    assert main(["pipeline", "run", str(uninterrupted), "--dry-run", f"train.overrides={overrides}"]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in said}
    assert "dpo.seed changed" in lines["train"]
    assert "unchanged" in lines["dataset"]
    assert "on the outcome of train" in lines["convert"]
    assert main(["pipeline", "run", str(uninterrupted), "--dry-run", "--from", "evaluate"]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in said}
    assert "asked for with --from" in lines["evaluate"]
    assert "unchanged" in lines["convert"]


# -- killed in every stage ---------------------------------------------------------------------------------------------


# Imported once, by the process that the others are forked from.
PRELOADED = [
    "posttrain.apps.evaluate.build",
    "posttrain.apps.ship.pipeline.runner",
    "mlflow",
    "transformers.models.llama.modeling_llama",
]


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killing(stage: Any) -> Callable[[Any, Path], Any]:
    """The work of a stage with a kill -9 in the middle of it, or, where it is over at once, at its worst moment: when
    all is done and nothing is written down.
    """
    original = stage.work

    def in_training(context: Any, folder: Path) -> Any:
        def beat() -> None:
            if 4 <= tiny_runs.count_rows(folder / "run") < tiny_pipelines.STEPS and list(
                (folder / "run").glob("step_*")
            ):
                kill_self()

        return original(replace(context, heartbeat=beat), folder)

    def in_evaluation(context: Any, folder: Path) -> Any:
        from posttrain.apps.evaluate.folder import EvaluationFolder

        append = EvaluationFolder.append

        def append_and_die(self: EvaluationFolder, *arguments: Any) -> None:
            append(self, *arguments)
            kill_self()

        EvaluationFolder.append = append_and_die  # type: ignore[method-assign]
        return original(context, folder)

    def in_conversion(context: Any, folder: Path) -> Any:
        from posttrain.apps.export import convert

        convert._write_tokenizer = lambda *_: kill_self()  # type: ignore[assignment]
        return original(context, folder)

    def at_the_end(context: Any, folder: Path) -> Any:
        original(context, folder)
        kill_self()

    return {"train": in_training, "evaluate": in_evaluation, "convert": in_conversion}.get(stage.name, at_the_end)


def run_and_die(file: str, victim: str, log: str) -> None:
    """In a process of its own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    from posttrain.apps.ship.pipeline import training_process

    training_process._POLL_S = 0.01
    for stage in ALL_STAGES:
        if stage.name == victim:
            stage.work = killing(stage)  # type: ignore[method-assign]
    os._exit(main(["pipeline", "run", file]))


def test_killed_in_the_middle_of_every_stage_it_gets_the_same_result(world: Path, uninterrupted: Path) -> None:
    home = world / "killed"
    file = tiny_pipelines.write_file(world / "killed.yaml", tiny_pipelines.settings(world, home))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for victim in STAGES:
        log = world / f"killed-{victim}.log"
        process = context.Process(target=run_and_die, args=(str(file), victim, str(log)))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, f"{victim}: {log.read_text()[-3000:]}"
        iteration = last_iteration(home)
        assert iteration.running == victim
        assert iteration.record(victim) is None
        assert not iteration.finished
    assert main(["pipeline", "run", str(file), "--quiet"]) == 0
    iteration = last_iteration(home)
    assert iteration.number == 1
    assert iteration.finished
    assert results(home) == results(world / "whole")
    trained = iteration.record("train")
    assert trained is not None
    assert len(list(trained.folder.parent.glob("train-*"))) == 1
    assert tiny_runs.results_of(trained.folder / "run") == tiny_runs.results_of(
        last_iteration(world / "whole").record("train").folder / "run"  # type: ignore[union-attr]
    )


# -- new data ----------------------------------------------------------------------------------------------------------


def test_new_traces_begin_a_second_iteration_from_production(
    world: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = world / "whole"
    registry = Registry(home / "registry")
    registry.promote("tiny", 1, "production", why="the canary was quiet")
    evaluations = set((home / "evaluations").iterdir())
    more = world / "more.jsonl"
    tiny_runs.write_rows(more, tiny_runs.traces(6, 6, seed=9))
    paths = f"traces.path=[{world / 'traces.jsonl'}, {more}]"
    overrides = yaml.safe_load(uninterrupted.read_text())["train"]["overrides"]
    quick = json.dumps([*overrides, "dpo.max_num_steps=4"])
    assert main(["pipeline", "run", str(uninterrupted), paths, f"train.overrides={quick}"]) == 0
    said = capsys.readouterr().err
    assert "iteration 2 begins: the traces have changed; it trains registry:tiny@1 (it is in production)" in said
    iteration = last_iteration(home)
    assert (iteration.number, iteration.finished) == (2, True)
    assert iteration.start.version == iteration.incumbent.version == 1  # type: ignore[union-attr]
    trained = iteration.record("train")
    assert trained is not None
    started_from = load_train_config(trained.folder)["policy"]["model_name"]
    assert Path(started_from) == registry.get("tiny", 1).path
    new = set((home / "evaluations").iterdir()) - evaluations
    assert len(new) == 1, "the model in production was measured when it was the candidate"
    assert [version.stage for version in registry.versions("tiny")] == ["production", "canary"]
    rows = json.loads((home / "kpi.json").read_text())
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[1]["predicted"]["num_steps"] == rows[1]["actual"]["num_steps"] == 4
    assert "train: predicted" in said, "from the steps of the first iteration"

    # A canary that was taken back stays back, and the iteration is over all the same.
    registry.rollback("tiny", stage="canary", why="error rate 7 %")
    assert main(["pipeline", "run", str(uninterrupted), paths, f"train.overrides={quick}"]) == 0
    shown = capsys.readouterr()
    assert "canary    skipped: version 2 was archived since" in shown.err
    assert last_iteration(home).finished
    rows = json.loads((home / "kpi.json").read_text())
    assert [(row["verdict"], row["stage"]) for row in rows] == [("promote", "production"), ("promote", "archived")]
    assert re.search(r"^2 .* promoted +2, archived ", shown.out, re.MULTILINE)
    assert "<td>promoted</td><td>2, archived</td>" in (home / "index.html").read_text()
    registry.promote("tiny", 2, "canary", why="it was the network")
    assert main(["pipeline", "run", str(uninterrupted), paths, f"train.overrides={quick}"]) == 0
    assert "canary    unchanged" in capsys.readouterr().err

    # The same traces, the same settings: nothing; the gate's settings: the gate, and what follows from it.
    arguments = ["pipeline", "run", str(uninterrupted), paths, f"train.overrides={quick}"]
    assert main([*arguments, "gate.overrides=[checks.reward.at_least=0.99, gate.max_problems=20]"]) == 3
    said = capsys.readouterr().err
    assert "evaluate  unchanged" in said
    assert "gate      runs: checks changed" in said or "gate      runs: gate changed" in said
    assert "canary    skipped: the gate rejected it" in said
    assert [version.stage for version in registry.versions("tiny")] == ["production", "canary", "candidate"]
    assert registry.get("tiny", 3).lineage.verdict == "reject"

    # Too few problems to tell: nothing is registered, and no canary.
    assert main([*arguments, "gate.overrides=[gate.min_problems=50]"]) == 4
    said = capsys.readouterr().err
    assert "registry  skipped: the gate has not decided" in said
    assert "canary    skipped: the gate has not decided" in said
    assert main([*arguments, "gate.overrides=[gate.min_problems=50]", "--dry-run"]) == 0
    assert "canary     skip       the gate has not decided" in capsys.readouterr().out
    assert len(registry.versions("tiny")) == 3

    # What was decided against another model than the one in use does not count.
    record = iteration.record("canary")
    assert record is not None
    assert record.outcome.values["command"][2:] == [
        *("registry:tiny@production", "--served-model-name", "tiny", "--registry", str(home / "registry")),
        *("--canary", "registry:tiny@canary", "--canary-share", "0.1", "--canary-max-error-rate", "0.05"),
        *("--canary-min-requests", "20", "--canary-min-feedback", "30"),
    ]
    registry.promote("tiny", 3, "production", why="an emergency", force=True)
    assert main([*arguments, "canary.share=0.3"]) == 64
    assert "canary: version 3 is in production now, and version 1 was" in capsys.readouterr().err
    registry.promote("tiny", 2, "production", why="better")
    assert main([*arguments, "canary.share=0.3"]) == 0
    assert "registry:tiny@2 is in production" in capsys.readouterr().err

    config = load_standalone(PipelineConfig, uninterrupted, ["pipeline.start_from=base"])
    start, why, incumbent = choose_models(config)
    assert (start.text, why) == (str(world / "base"), "pipeline.start_from is base")
    assert incumbent is not None
    assert incumbent.version == 2

    other = ["--until", "convert", "convert.dtype=bfloat16", "convert.verify=false"]
    assert main([*arguments, *other]) == 0
    assert "convert   runs: dtype changed: None → 'bfloat16'; verify changed: True → False" in capsys.readouterr().err
    iteration = last_iteration(home)
    assert not iteration.finished
    assert iteration.record("gate") is None, "what was decided was decided of another model"
    record = iteration.record("convert")
    assert record is not None
    assert json.loads((record.path("model") / "config.json").read_text())["dtype"] == "bfloat16"
    assert "not verified" in record.outcome.headline


def load_train_config(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "train.yaml").read_text())
    return loaded


def test_the_file_of_the_demo_loads() -> None:
    path = Path(__file__).parents[2] / "configs" / "pipelines" / "demo.yaml"
    config = load_standalone(PipelineConfig, path)
    assert config.demo is not None
    assert config.base_model == f"{config.demo.folder}/model"
