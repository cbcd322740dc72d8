"""The notebooks of the examples, executed as a user would, in a kernel of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient: pip install -e '.[dev]'")
nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).parents[2] / "examples"


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **replaced: str) -> str:
    """What the cells showed, as JSON."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    for cell in notebook.cells:
        for old, new in replaced.items():
            cell.source = cell.source.replace(f"{old} = 20", f"{old} = {new}")
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "Traceback" not in shown
    return shown


def test_the_first_hour_ends_with_a_better_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = executed("first_hour.ipynb", tmp_path, monkeypatch)
    assert "finished, step 200 of 200" in shown
    assert "finished, step 40 of 40" in shown
    assert "B is better" in shown


def test_the_notebook_runs_and_its_reward_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = executed("notebooks/own_reward.ipynb", tmp_path, monkeypatch, STEPS="6")
    assert "data:image/svg+xml" in shown  # the live chart
    assert "finished, step 6 of 6" in shown
    rows = [json.loads(line) for line in (tmp_path / "results/notebook/grpo/metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in rows]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.02
    assert list((tmp_path / "results/notebook/grpo/inputs").glob("digits-*.pkl"))
