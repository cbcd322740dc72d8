"""pipeline.yaml: errors name the field, and nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import yaml

from posttrain.cli.main import main


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.save_world(tmp_path_factory.mktemp("world"))


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *sections, last = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("pipeline.start_form", "base", "unknown key `pipeline.start_form`; did you mean `pipeline.start_from`?"),
        ("train.algorithm", "rm", "`train.algorithm` = 'rm': must be 'grpo', 'ppo', 'distill' or 'dpo'"),
        ("train", {"algorithm": "distill"}, "train: teacher.model_name is not set"),
        ("pipeline.name", "a b", "`pipeline.name` = 'a b': letters, digits"),
        ("dataset", {"kind": "groups"}, "dataset.kind is groups and train.algorithm is dpo, which takes auto or pairs"),
        ("dataset", {"pairs": {"preferred": 0.2}}, "dataset.pairs: preferred 0.2 is below rejected_below 0.5"),
        ("traces", 3, "`traces` = 3: must be a map of settings"),
        ("traces", {}, "`traces.path` is missing"),
        ("schedule", "soon", "`schedule` = 'soon': five fields as in cron"),
        ("evaluate", {}, "`evaluate` = a map with nothing in it: Dictionary should have at least 1 item"),
        ("canary", {"share": 1.5}, "`canary.share` = 1.5: must be less than or equal to 1"),
        ("train.overrides", ["dpo.max_num_stepz=3"], "train.overrides: unknown key `dpo.max_num_stepz`"),
        ("train.overrides", ["policy.model_name=x"], "the pipeline sets policy.model_name itself; see base_model"),
        ("train.overrides", ["checkpointing.enabled=false"], "train: checkpointing.enabled is false"),
        ("train.config", "nowhere.yaml", "nowhere.yaml"),
        ("evaluate.main.overrides", ["eval.k_value=4"], "evaluate.main: eval.k_value = 4"),
        ("evaluate.main.overrides", ["eval.save_path=x"], "evaluate.main.overrides: `eval.save_path=x`"),
        (
            "evaluate.main.overrides",
            ["data.dataset_name=no.jsonl"],
            "evaluate.main: file or folder not found: no.jsonl",
        ),
        ("evaluate.main.overrides", ["data.dataset_name={world}/traces.jsonl", "data.solution_key=x"], "no key 'x'"),
        (
            "evaluate.main.overrides",
            ["data.dataset_name={world}/problems.jsonl", "env.mine.function=no.py:f"],
            "evaluate.main: env.mine.function is 'no.py:f': there is no file",
        ),
        ("gate.config", "no_gate.yaml", "no_gate.yaml"),
        (
            "gate.overrides",
            ["checks.reward.evaluation=safety"],
            "checks.reward.evaluation is 'safety', and `evaluate` has",
        ),
        (
            "gate.overrides",
            ["checks.reward.metric=rewardz"],
            "checks.reward: 'rewardz' will not be measured (did you mean",
        ),
        ("gate.overrides", ["checks.reward.metric=pass@9"], "More samples per problem: eval.num_tests_per_prompt"),
        ("gate.overrides", ["checks.reward.metric=cost_per_answer"], "if eval.gpu_hour_price is set"),
        ("gate.overrides", ["checks.reward.metric=format_rate"], "checks.reward: format_rate needs `patterns`"),
        (
            "gate.overrides",
            ["checks.x={metric: refusal_rate, better_by: 0.1}"],
            "checks.x: is a higher refusal_rate better",
        ),
        ("registry.location", __file__, "registry.location: "),
        ("traces.path", [], "`traces.path` = []: "),
        ("traces.path", "nothing.jsonl", "traces.path: "),
        ("base_model", "no/such/model", "base_model: no folder 'no/such/model'"),
    ],
)
def test_errors_in_the_file_name_the_field(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, words: str
) -> None:
    if path == "evaluate.main.overrides":
        value = [text.format(world=world) for text in value]
    values = changed(tiny_pipelines.settings(world, tmp_path / "home"), path, value)
    file = tiny_pipelines.write_file(tmp_path / "pipeline.yaml", values)
    assert main(["pipeline", "run", str(file), "--until", "traces" if path == "base_model" else "canary"]) == 64
    assert words in capsys.readouterr().err
    assert not list((tmp_path / "home").glob("iteration_*")), "nothing has begun"


def test_invalid_stages_and_from_are_errors(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_pipelines.write_file(tmp_path / "p.yaml", tiny_pipelines.settings(world, tmp_path / "home"))
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "run", str(file), "--until", "evaluation"])
    assert ended.value.code == 64
    assert main(["pipeline", "run", str(file), "--from", "gate"]) == 64
    assert "--from gate: traces has not run in iteration 1" in capsys.readouterr().err
    assert main(["pipeline", "run", str(tmp_path / "none.yaml")]) == 64


def test_overrides_until_and_schedule(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {**tiny_pipelines.settings(world, tmp_path / "home"), "schedule": "0 3 * * *"}
    file = tiny_pipelines.write_file(tmp_path / "p.yaml", values)
    assert main(["pipeline", "status", str(file)]) == 0
    assert "nothing has run yet" in capsys.readouterr().out
    other = tmp_path / "other"
    assert main(["pipeline", "run", str(file), "--until", "dataset", f"pipeline.folder={other}"]) == 0
    assert "let a scheduler start this command" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert main(["pipeline", "status", str(file), f"pipeline.folder={other}"]) == 0
    shown = capsys.readouterr().out
    assert "iteration 1, not finished" in shown
    assert "20 pairs" in shown
    assert yaml.safe_load((other / "kpi.json").read_text())[0]["dataset"] == "20 pairs"


# -- a dry run, while the demo's model and data are still to be made ---------------------------------------------------


def demo_file(world: Path, home: Path, path: str = "", value: Any = None) -> Path:
    """As the other file, over a model, traces and problems that the demo would make."""
    values = tiny_pipelines.settings(world, home)
    values |= {"demo": {"folder": str(home / "world")}, "base_model": str(home / "world/model")}
    values["traces"]["path"] = str(home / "world/traces.jsonl")
    evaluation = values["evaluate"]["main"]["overrides"]
    evaluation[0] = f"data.dataset_name={home / 'world/unseen.jsonl'}"
    if path.endswith("overrides") and path != "gate.overrides":
        value = [*(evaluation if path.startswith("evaluate") else values["train"]["overrides"]), *value]
    home.mkdir()
    return tiny_pipelines.write_file(home / "pipeline.yaml", changed(values, path, value) if path else values)


def test_dry_run_lists_unchecked_settings(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = demo_file(world, tmp_path / "home")
    assert main(["pipeline", "run", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "makes model, traces.jsonl, unseen.jsonl in" in shown
    assert "the settings of every stage up to canary" in shown
    assert "not made yet: base_model, traces.path, evaluate.main.data.dataset_name\n" in shown
    assert main(["pipeline", "run", str(file), "--dry-run", "--until", "dataset"]) == 0
    assert "not made yet: base_model, traces.path\n" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["pipeline.yaml"], "nothing was changed"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.overrides", ["dpo.max_num_stepz=3"], "did you mean `dpo.max_num_steps`?"),
        ("train.overrides", ["dpo.max_num_steps=many"], "`dpo.max_num_steps` = 'many': must be a valid integer"),
        ("train.overrides", ["dpo.max_num_steps=-1"], "`dpo.max_num_steps` = -1: must be greater than"),
        ("train.checkpoint", "best", "train.checkpoint is best, and checkpointing.metric_name is null"),
        ("evaluate.main.overrides", ["eval.seed=no"], "evaluate.main.overrides: `eval.seed`"),
        (
            "evaluate.main.overrides",
            ["generation.backend=openai_url", "generation.openai_cfg.url=http://localhost:1/v1"],
            "evaluate.main: generation.openai_cfg names a server",
        ),
        ("gate.overrides", ["gate.confidence=2"], "gate.overrides: `gate.confidence` = 2: must be less than 1"),
        ("dataset", {"pairs": {"preferred": 0.2}}, "dataset.pairs: preferred 0.2 is below rejected_below 0.5"),
        ("base_model", "no/such/model", "base_model: no folder 'no/such/model'"),
        ("traces.path", "nothing.jsonl", "traces.path: "),
    ],
)
def test_dry_run_checks_settings_that_do_not_need_the_demo(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, words: str
) -> None:
    file = demo_file(world, tmp_path / "home", path, value)
    assert main(["pipeline", "run", str(file), "--dry-run"]) == 64
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "wet"])
@pytest.mark.parametrize(
    ("path", "name"),
    [("base_model", "modell"), ("traces.path", "trace.jsonl"), ("evaluate.main.overrides", "unsen.jsonl")],
)
def test_names_are_checked_before_the_demo_makes_files(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, name: str, dry: list[str]
) -> None:
    text = str(tmp_path / "home/world" / name)
    file = demo_file(world, tmp_path / "home", path, [f"data.dataset_name={text}"] if "overrides" in path else text)
    assert main(["pipeline", "run", str(file), *dry]) == 64
    key = "evaluate.main.data.dataset_name" if "overrides" in path else path
    said = capsys.readouterr().err
    assert f"{key}: the demo makes model, traces.jsonl, unseen.jsonl in " in said
    assert f"and no {name}" in said
    assert not (tmp_path / "home/world").exists()


def test_missing_file_is_reported_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "run"])
    assert ended.value.code == 64
    assert capsys.readouterr().err.strip().endswith("the following arguments are required: FILE")
