"""What docs/seeds/checked.md says of the published guides was seen, and is seen again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from seed_features import (
    FEATURES,
    LINES,
    ROWS,
    check_feature,
    flat,
    guide_group,
    guide_head,
    guide_job,
    our_cluster,
    our_group,
    our_job,
    recorded,
    why_absent,
)

from posttrain.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", [row for row in FEATURES if "run" in row], ids=lambda row: row["feature"])
def test_a_command_shows_the_feature(
    row: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(row["run"])
    shown = capsys.readouterr()
    check_feature(row, shown.out + "\n" + shown.err)


def test_every_command_is_in_its_script_and_every_row_was_seen() -> None:
    for row in FEATURES:
        if "command" in row:
            script = (ROOT / "examples" / "seeds" / f"{row['seed']}.sh").read_text(encoding="utf-8")
            assert row["command"].removeprefix("posttrain ") in script, row["feature"]
    names = [f"{row['seed']} {row['feature']}" for row in FEATURES]
    names += [f"{row['seed']} {row['printed']}" for row in LINES if "ours" in row]
    assert len(set(names)) == len(names)
    assert set(recorded()) == set(names), "SEED_RECORD=1 records them: see seed_features.py"


def test_variables_of_the_guide_are_rendered_for_its_fabric() -> None:
    """But for LD_LIBRARY_PATH, which has gIB's folder before the guide's. RAY_GROUP, a reference, is of its logs."""
    ours, given = flat(our_group()), flat(guide_group()).items()
    printed = {path: value for path, value in given if ".env[" in path and path.endswith(".value")}
    assert len(printed) == 9
    assert [path for path, value in printed.items() if ours.get(path) != value] == [
        "template.spec.containers[0].env[LD_LIBRARY_PATH].value"
    ]


def test_every_field_that_is_not_rendered_has_a_reason() -> None:
    pairs = [(guide_job(), our_job()), (guide_group(), our_group()), (guide_head(), our_cluster())]
    missing = [path for guide, ours in pairs for path in flat(guide) if path not in flat(ours)]
    used = {why_absent(path) for path in missing}
    assert used == {row["why"] for row in ROWS["absent"]}
