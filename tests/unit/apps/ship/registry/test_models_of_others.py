"""Models that were created in MLflow by other means, under a name that is then used here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tiny_pipelines

from posttrain.apps.ship.pipeline.iteration_models import versions_of
from posttrain.apps.ship.registry import Lineage, Registry
from posttrain.apps.ship.registry.store import _MARK
from posttrain.config.pipeline import PipelineConfig


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
