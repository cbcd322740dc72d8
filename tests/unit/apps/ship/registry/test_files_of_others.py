"""What others wrote: edited files, models made in MLflow, verdicts on other files; the registry on the dashboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import tiny_runs

from posttrain.apps.ship.pipeline.iteration_models import versions_of
from posttrain.apps.ship.registry import Lineage, Registry, RegistryError, gather_lineage
from posttrain.apps.ship.registry.store import _MARK
from posttrain.apps.watch.shipping import registry_page
from posttrain.cli.main import main
from posttrain.config.pipeline import PipelineConfig


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "holds a JSON list"),
        ('{"data": 5}', "data is 5; a list is needed"),
        ('{"metrics": [1]}', r"metrics is \[1\]; a dict is needed"),
        ('{"base_model": 5}', "base_model is 5; a str is needed"),
        ("[" * 200_000, "nested more than 100 deep"),
    ],
)
def test_conversion_json(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(RegistryError, match=f"conversion.json: .*{reason}"):
        gather_lineage(tmp_path)


def test_parts_of_conversion_json_that_are_no_record_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text('{"data": [5], "metrics": {"validation/x": "y", "validation/z": 1}}')
    lineage = gather_lineage(tmp_path)
    assert (dict(lineage.data), dict(lineage.metrics)) == ({}, {"training/validation/z": 1.0})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ('"candidate": 5', "candidate is 5; a dict is needed"),
        ('"candidate": {"a": 5}', "a is 5; a dict is needed"),
        ('"reasons": 5', "reasons is 5; a list is needed"),
    ],
)
def test_report_of_the_gate(fields: str, reason: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate.json"
    gate.write_text(f'{{"verdict": "promote", {fields}}}')
    with pytest.raises(RegistryError, match=f"gate.json: {reason}"):
        gather_lineage(tmp_path, gate=gate)


def test_model_created_in_mlflow_is_listed_once_it_has_our_versions(
    registry: Registry, make_model: Callable[[str], Path]
) -> None:
    registry._store.client.create_registered_model("tiny")
    assert registry.names() == []
    assert not registry.has("tiny")
    registry.add("tiny", make_model("a"), Lineage())
    assert registry.names() == ["tiny"]


def test_a_pipeline_finds_its_versions_by_their_records(
    registry: Registry, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = tiny_pipelines.settings(tmp_path, tmp_path / "home")
    config = PipelineConfig.model_validate({**settings, "registry": {"location": registry.location.text}})
    assert versions_of(config) == []
    registry.add("tiny", make_model("a"), Lineage())
    registry._store.client.delete_registered_model_tag("tiny", _MARK)
    assert [version.version for version in versions_of(config)] == [1], "otherwise it is added once more by every run"


def test_versions_and_history_are_shown(
    registry: Registry, registry_folder: Path, make_model: Callable[[str], Path], passed: Lineage
) -> None:
    for content in ("a", "b"):
        registry.add("maths", make_model(content), lineage=passed, by="ada")
    registry.promote("maths", 1, to="canary", why="first look", by="ada")
    before = {path: path.read_bytes() for path in registry_folder.rglob("*") if path.is_file()}
    (model,) = registry_page(str(registry_folder))["models"]
    assert [(one["version"], one["stage"]) for one in model["versions"]] == [(2, "candidate"), (1, "canary")]
    assert model["versions"][0]["metrics"] == {"main/pass@1": 0.5}
    assert [(entry["why"], entry["by"]) for entry in model["history"]] == [("first look", "ada")]
    assert {path: path.read_bytes() for path in registry_folder.rglob("*") if path.is_file()} == before


def test_missing_registry_is_a_sentence(tmp_path: Path) -> None:
    found = registry_page(str(tmp_path))
    assert found["models"] == []
    assert "no registry" in found["problem"]


def write_verdict(path: Path, **candidate: Any) -> Path:
    path.write_text(json.dumps({"verdict": "promote", "reasons": [], "candidate": candidate}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.save_model(tmp_path_factory.mktemp("models") / "model")


def test_verdict_on_an_unknown_model_does_not_pass(
    registry: Registry, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = write_verdict(tmp_path / "gate.json", main={"model": "http://host/v1", "model_fingerprint": None})
    where = ["--registry", registry.location.text]
    assert main(["registry", "add", "m", str(model), "--gate", str(verdict), *where]) == 0
    said = "the gate judged http://host/v1, which is not known to be this model: promoting needs --force"
    assert said in capsys.readouterr().err
    with pytest.raises(RegistryError, match="its gate judged http://host/v1, which is not known to be this model"):
        registry.promote("m", 1, "canary", why="x")
    assert main(["registry", "show", "m", *where]) == 0
    assert "http://host/v1, not known to be this model" in capsys.readouterr().out
    entry = registry.promote("m", 1, "canary", why="x", force=True)
    assert entry is not None
    assert entry.change.forced


def test_one_unknown_model_among_those_judged_is_enough(model: Path, tmp_path: Path) -> None:
    from posttrain.models.accepted_names import folder_fingerprint

    ours = {"model": str(model), "model_fingerprint": folder_fingerprint(model)}
    known = write_verdict(tmp_path / "known.json", main=ours, safety=ours)
    assert gather_lineage(model, gate=known).objection is None
    partly = write_verdict(tmp_path / "partly.json", main=ours, safety={"model": "org/hub", "model_fingerprint": None})
    assert "org/hub, which is not known to be this model" in str(gather_lineage(model, gate=partly).objection)
    nameless = write_verdict(tmp_path / "nameless.json")
    assert "a model that its report does not name" in str(gather_lineage(model, gate=nameless).objection)
    other = write_verdict(tmp_path / "other.json", main={**ours, "model_fingerprint": "another"})
    assert "which differ" in str(gather_lineage(model, gate=other).objection)
