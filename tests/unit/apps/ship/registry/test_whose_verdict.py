"""A verdict counts for the files that it was about, and for nothing of which that is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

from posttrain.apps.ship.registry import Registry, RegistryError, gather_lineage
from posttrain.cli.main import main


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
