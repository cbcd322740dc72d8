"""Prints `--first FILE` for each test file that the newest commits touch: its own changes, or those of a module that it
imports.

python tools/touched_tests.py [HOURS]    commits of the last HOURS (24)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed_files(hours: int) -> set[str]:
    command = ["git", "log", f"--since={hours} hours ago", "--name-only", "--format="]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def touched_tests(changed: set[str]) -> list[str]:
    ours = [Path(name.removeprefix("src/")) for name in changed if name.startswith("src/posttrain/")]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in ours if path.suffix == ".py"}
    packages = tuple(".".join(path.parent.parts) + "." for path in ours if path.suffix != ".py")  # rules, pages, assets
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        imported = imports_of(path.read_text("utf-8"))
        if name in changed or modules & imported or any(f"{module}.".startswith(packages) for module in imported):
            found.append(name)
    return found


def imports_of(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


if __name__ == "__main__":
    hours = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(" ".join(f"--first {name}" for name in touched_tests(changed_files(hours))))
