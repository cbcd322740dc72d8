"""A registry with its tables made once: making them takes MLflow seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="the registry needs the extra `registry`")

from posttrain.apps.ship.registry import Lineage, Registry
from posttrain.apps.ship.registry.store import DATABASE

GATE = {"verdict": "promote", "reasons": ["better"], "report": "gate.json"}


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("registry-template")
    with Registry(folder)._store.writing():
        pass
    return folder / DATABASE


@pytest.fixture
def registry_folder(empty_database: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "registry"
    folder.mkdir()
    shutil.copy(empty_database, folder / DATABASE)
    return folder


@pytest.fixture
def registry(registry_folder: Path) -> Registry:
    return Registry(registry_folder, wait_s=5)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], Path]:
    def make(content: str) -> Path:
        folder = tmp_path / f"model-{content}"
        (folder / "sub").mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights {content}")
        (folder / "sub" / "config.json").write_text("{}")
        return folder

    return make


@pytest.fixture
def passed() -> Lineage:
    """The lineage of a version that its gate let through."""
    return Lineage(base_model="base", code_version="1", gate=GATE, metrics={"main/pass@1": 0.5})
