"""The registry on the dashboard: versions, stages and history, read without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posttrain.apps.ship.registry import Lineage, Registry
from posttrain.apps.watch.shipping import registry_page


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
