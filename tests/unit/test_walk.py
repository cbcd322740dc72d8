"""docs/concepts.md lists the files from `posttrain grpo` to a checkpoint, in the order of calls."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILES = 60


def test_the_walk_names_files_that_exist_and_does_not_grow() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from measure import walk_of_a_run

    walk = walk_of_a_run()
    assert [name for name in walk if not (ROOT / "src" / "posttrain" / name).is_file()] == []
    assert 0 < len(walk) <= MAX_FILES
