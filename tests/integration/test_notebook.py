"""The notebook of the examples, executed as a user would, in a kernel of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient: pip install -e '.[dev]'")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "own_reward.ipynb"


def test_the_notebook_runs_and_its_reward_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 20", "STEPS = 6")
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "data:image/svg+xml" in shown  # the live chart
    assert "finished, step 6 of 6" in shown
    assert "Traceback" not in shown
    rows = [json.loads(line) for line in (tmp_path / "results/notebook/grpo/metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in rows]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.02
    assert list((tmp_path / "results/notebook/grpo/inputs").glob("digits-*.pkl"))
