"""The registry on an MLflow tracking server: files travel there and back, and no lock is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="the registry needs the extra `registry`")
pytest.importorskip("flask", reason="MLflow's server needs flask")

from posttrain.apps.ship.registry import Lineage, Registry, RegistryConflict, RegistryError, resolve_version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, where it keeps artifacts)"""
    folder = tmp_path_factory.mktemp("tracking-server")
    database, artifacts = f"sqlite:///{folder}/server.db", folder / "artifacts"
    settings = {
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(artifacts),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        from mlflow.server import app
        from werkzeug.serving import make_server

        serving = make_server("127.0.0.1", 0, app, threaded=True)
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", artifacts
        serving.shutdown()
        thread.join()


def test_a_version_goes_to_a_tracking_server_and_comes_back(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, artifacts = server
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "model.safetensors").write_text("weights")
    (model / "sub" / "config.json").write_text("{}")
    registry = Registry(address, wait_s=10)
    passed = Lineage(gate={"verdict": "promote", "reasons": [], "report": ""})
    registry.add("m", model, passed)
    registry.add("m", model, passed, in_place=True)
    registry.promote("m", 1, "production", why="first", by="ann", expect=0)
    with pytest.raises(RegistryConflict, match="production was version 1, not empty"):
        registry.promote("m", 2, "production", why="second", expect=0)
    assert [(entry.change.version, entry.change.by) for entry in registry.history("m")] == [(1, "ann")]

    found = resolve_version("registry:m@production", registry=address)
    assert found.path.is_relative_to(tmp_path / "cache")
    assert (found.path / "model.safetensors").read_text() == "weights"
    assert (found.path / "sub" / "config.json").read_text() == "{}"
    assert registry.resolve("m", 2).path == model

    (kept,) = artifacts.rglob("model.safetensors")
    kept.write_text("WEIGHTS")
    assert registry.resolve("m", 1).version == 1, "what was downloaded before is as good as ever"
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "another"))
    with pytest.raises(RegistryError, match=r"model\.safetensors is not what was registered"):
        registry.resolve("m", 1)
    assert not any((tmp_path / "another" / "registry").iterdir()), "nothing half-downloaded is left behind"
