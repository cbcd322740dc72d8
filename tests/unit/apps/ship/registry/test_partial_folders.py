"""Incomplete folders are invisible, removed after a kill, and never block another writer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.ship.registry import Lineage, Registry
from posttrain.apps.ship.registry import artifacts as artifacts_module
from posttrain.apps.ship.registry.artifacts import PartialFolder, clear_abandoned, content_digest, measure, put_in_place
from posttrain.apps.ship.registry.version import ModelVersion

Make = Callable[[str], Path]

HOLDS = """
import sys
from pathlib import Path
from posttrain.apps.ship.registry.artifacts import PartialFolder
folder = PartialFolder(Path(sys.argv[1]))
(folder.path / "half").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


class Downloads:
    """A store with files on a server; `meanwhile` happens while they are on their way."""

    def __init__(self, files: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.files, self.meanwhile, self.count = files, meanwhile, 0

    def download(self, source: str, target: Path) -> None:
        shutil.copytree(self.files, target / "model")
        self.count += 1
        self.meanwhile()


@pytest.fixture
def uploaded(make_model: Make, tmp_path: Path) -> tuple[Registry, Downloads, ModelVersion]:
    """A registry on a server, what is downloaded from it, and a version whose files are not here yet."""
    files = measure(make_model("a"))
    path = tmp_path / "cache" / content_digest(files)[:24]
    version = ModelVersion("m", 1, "production", path, files, Lineage(), "me", "now", uploaded_to="mlflow-artifacts:/m")
    registry, store = Registry("http://nowhere"), Downloads(tmp_path / "model-a")
    registry._store = store  # type: ignore[assignment]
    return registry, store, version


def test_a_damaged_download_is_downloaded_again(uploaded: tuple[Registry, Downloads, ModelVersion]) -> None:
    registry, store, version = uploaded
    assert registry.verify(version) == []
    assert registry.verify(version) == []
    assert store.count == 1
    (version.path / "model.safetensors").write_text("weights b")
    assert registry.verify(version) == []
    assert (version.path / "model.safetensors").read_text() == "weights a"
    assert store.count == 2
    assert list(version.path.parent.iterdir()) == [version.path]


@pytest.mark.parametrize("content", ["weights a", "weights b"])
def test_two_downloads_at_once_leave_one_whole_folder(
    uploaded: tuple[Registry, Downloads, ModelVersion], content: str
) -> None:
    registry, store, version = uploaded

    def another_is_quicker() -> None:
        shutil.copytree(store.files, version.path)
        (version.path / "model.safetensors").write_text(content)

    store.meanwhile = another_is_quicker
    assert registry.verify(version) == []
    assert (version.path / "model.safetensors").read_text() == "weights a"
    assert sorted(path.name for path in version.path.iterdir()) == ["model.safetensors", "sub"]
    assert list(version.path.parent.iterdir()) == [version.path]


def test_two_processes_may_replace_the_same_damaged_folder(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, target = make_model("a"), tmp_path / "target"
    files = measure(good)
    shutil.copytree(make_model("b"), target)
    real = artifacts_module.find_damage

    def taken_away_meanwhile(folder: Path, *arguments: Any, **named: Any) -> list[str]:
        found = real(folder, *arguments, **named)
        shutil.rmtree(target)
        return found

    monkeypatch.setattr(artifacts_module, "find_damage", taken_away_meanwhile)
    assert not put_in_place(good, target, files)
    assert (target / "model.safetensors").read_text() == "weights a"


def test_remains_of_a_killed_add_are_removed_by_the_next(registry: Registry, make_model: Make, tmp_path: Path) -> None:
    model = make_model("a")
    root = registry.location.folder
    assert root is not None
    place = root / "artifacts" / "m"
    writers = [
        subprocess.Popen([sys.executable, "-c", HOLDS, str(place)], stdin=-1, stdout=-1, text=True) for _ in range(2)
    ]
    killed, living = (Path(str(writer.stdout.readline()).strip()) for writer in writers if writer.stdout)
    os.kill(writers[0].pid, signal.SIGKILL)
    writers[0].wait()
    registry.add("m", model, Lineage())
    assert not killed.exists()
    assert (living / "half").exists(), "somebody is still writing it"
    writers[1].communicate("")


@pytest.mark.parametrize("is_open", [False, True])
def test_folder_removed_as_abandoned_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    real = os.open
    cleared: list[Path] = []

    def cleared_before_it_is_locked(path: Any, *arguments: Any, **named: Any) -> int:
        descriptor = real(path, *arguments, **named) if is_open or cleared else None
        if not cleared:
            cleared.append(Path(path))
            clear_abandoned(tmp_path)
        return real(path, *arguments, **named) if descriptor is None else descriptor

    monkeypatch.setattr(os, "open", cleared_before_it_is_locked)
    folder = PartialFolder(tmp_path)
    assert not cleared[0].exists()
    assert folder.path.exists()
    folder.remove()
    assert list(tmp_path.iterdir()) == []
