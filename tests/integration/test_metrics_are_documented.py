"""docs/metrics.md explains every key that a run writes, and no key that none writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_runs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")


def is_explained(key: str) -> bool:
    """By its own name, as `_min` or `_max` of it, as one of a family such as `train/reward/<part>`, or, of a
    validation, by the metric of training that it repeats.
    """
    if key.startswith("validation/") and is_explained(key.replace("validation/", "train/", 1)):
        return True
    stem = key.removesuffix("_min").removesuffix("_max")
    family = key.rpartition("/")[0]
    return f"`{key}`" in PAGE or f"`{key.rpartition('/')[2]}`" in PAGE or f"`{stem}`" in PAGE or f"`{family}/<" in PAGE


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
def test_every_key_of_a_run_is_explained(kind: str, tmp_path: Path) -> None:
    model, data = tiny_runs.save_model(tmp_path / "model"), tiny_runs.save_data(tmp_path / "data")
    arguments = getattr(tiny_runs, kind)(model, data, tmp_path / "run", steps=2)
    extra = ["loss_fn.reference_policy_kl_penalty=0.01"] if kind == "grpo" else []
    assert tiny_runs.run([*arguments, *extra]) == 0
    keys = {key for row in tiny_runs.rows_of(tmp_path / "run") for key in row}
    assert sorted(key for key in keys - {"step"} if not is_explained(key)) == []


def test_every_explained_key_is_written_somewhere() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "posttrain").rglob("*.py"))
    explained = set(re.findall(r"`(?:train|validation|performance)/([a-z0-9_/]+)`", PAGE))
    names = {key.rpartition("/")[2].removeprefix("peak_gib_").removesuffix("_max") for key in explained}
    assert sorted(name for name in names if name not in source) == []
