"""Prints `--first FILE` for each test file that the newest commits touch: its own changes, or those of a module that it
imports.

python tools/touched_tests.py [HOURS]    commits of the last HOURS (24)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed_files(hours: int) -> set[str]:
    command = ["git", "log", f"--since={hours} hours ago", "--name-only", "--format="]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def touched_tests(changed: set[str]) -> list[str]:
    modules = {
        name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in changed
        if name.startswith("src/posttrain/") and name.endswith(".py")
    }
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        imported = re.findall(r"^\s*(?:from|import) (posttrain[\w.]*)", path.read_text("utf-8"), re.MULTILINE)
        if name in changed or modules.intersection(imported):
            found.append(name)
    return found


if __name__ == "__main__":
    hours = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(" ".join(f"--first {name}" for name in touched_tests(changed_files(hours))))
