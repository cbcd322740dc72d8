"""The example that is learnt only by looking: right about unseen pictures, at chance with the pictures of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_a_model_from_scratch_learns_to_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["red_square.py"])
    import red_square

    example: Any = red_square
    shares: dict[tuple[str, str], float] = {}
    measure = example.accuracy

    def kept(model: Path, rows: str) -> float:
        shares[model.name, rows] = measure(model, rows)
        return shares[model.name, rows]

    monkeypatch.setattr(example, "accuracy", kept)
    assert example.main() == 0
    assert shares["model", "unseen"] < 0.35
    assert shares["grpo", "unseen"] > 0.85
    assert shares["grpo", "unseen"] > shares["sft", "unseen"]
    assert shares["grpo", "shuffled"] < 0.4
