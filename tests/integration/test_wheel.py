"""The wheel brings what a user without a clone needs: configs, examples, assets, and a command that trains."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_runs import save_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


def test_configs_examples_and_assets_are_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("configs", "examples"):
        tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True).stdout.split()
        assert {f"posttrain/bundled/{name}" for name in tracked} <= names
    package = ROOT / "src"
    files = [path.relative_to(package) for path in (package / "posttrain").rglob("*") if path.is_file()]
    assert {str(path) for path in files if "__pycache__" not in path.parts} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_init_and_a_training_step_work_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Of the wheel alone: the repository is not on the path. Dependencies are those of the environment of the tests."""
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    model, work = save_model(tmp_path / "model", max_length=256), tmp_path / "work"
    work.mkdir()

    def posttrain(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "posttrain", *words]
        done = subprocess.run(program, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert "posttrain sft --config sft.yaml" in posttrain("init", "sft")
    posttrain(
        "sft", "--config", "sft.yaml", f"model={model}", "precision=float32", "max_length=256", "steps=1", "--quiet"
    )
    assert (work / "results/sft/step_1").is_dir()
